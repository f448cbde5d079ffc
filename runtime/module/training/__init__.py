"""The training step of a placed module, and the warning to a caller who expects gradients without one.

Input: the program of a step and a call. Output: results from which autograd can start, and gradients.
"""
