"""An assignment becomes a schedule: every transfer and prefetch explicit, in order.

In: a graph, the devices, an assignment. Out: a :class:`~graphplan.ir.schedule.Schedule`.
"""
