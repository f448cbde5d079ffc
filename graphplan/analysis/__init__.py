"""Analysis of a plan: why something is where it is, what limits the plan, what would help.

Input: a plan. Output: plain results that print themselves.
"""
