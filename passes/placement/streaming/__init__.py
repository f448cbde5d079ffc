"""Placements whose weights are streamed from CPU memory.

In: a problem. Out: the best placement that is found, and a bound.
"""
