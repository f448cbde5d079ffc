"""The search for placements whose weights are streamed from CPU memory.

In: a problem. Out: the best placement that was found, and a bound.
"""
