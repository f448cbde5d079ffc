"""Bounds, and searches that are guided by them, over the frontier of live values and by integer programs.

In: `Arrays` of a problem. Out: seconds that no placement is below, and placements.
"""
