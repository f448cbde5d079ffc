"""Analysis of a plan: the reasons for a placement, the bottleneck, and the gain from other budgets.

Input: a plan. Output: plain results that print themselves.
"""
