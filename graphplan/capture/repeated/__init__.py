"""One trace for all equal blocks of a stack.

Input: the calls of modules while a model is traced. Output: their results, and the nodes in the graph that a
trace of each call would have added.
"""
