"""Lower bounds, and searches guided by them: dynamic programs over the frontier, and integer programs.

Input: `Arrays` of a problem. Output: lower bounds in seconds, and placements.
"""
