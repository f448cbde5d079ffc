"""The training step of a placed module, and the warning to a caller who wants gradients without one.

In: the program of a step and a call. Out: results from which autograd can start, and gradients.
"""
