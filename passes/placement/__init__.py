"""The search for a device for every operation and weight, with a lower bound on the time.

Input: a :class:`~graphplan.passes.placement.problem.Problem`. Output: a
:class:`~graphplan.passes.placement.certificate.Solution`. The evaluator judges every placement.
"""
