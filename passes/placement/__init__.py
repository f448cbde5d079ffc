"""The search: where every operation runs and every weight resides, and a bound on the time.

In: a :class:`~graphplan.passes.placement.problem.Problem`. Out: a
:class:`~graphplan.passes.placement.certificate.Solution`. The evaluator judges every placement.
"""
