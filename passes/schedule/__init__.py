"""Conversion of an assignment to a schedule: every transfer and prefetch explicit, in order.

Input: a graph, the devices, an assignment. Output: a :class:`~graphplan.ir.schedule.Schedule`.
"""
