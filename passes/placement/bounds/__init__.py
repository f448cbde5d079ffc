"""Lower bounds, and searches guided by them: dynamic programs over the frontier, and integer programs.

In: `Arrays` of a problem. Out: lower bounds in seconds, and placements.
"""
