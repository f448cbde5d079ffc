"""The search for placements whose weights are streamed from CPU memory.

Input: a problem. Output: the best placement that was found, and a bound.
"""
