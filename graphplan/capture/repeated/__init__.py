"""One trace for all equal blocks of a stack.

In: the calls of modules while a model is traced. Out: their results, and the nodes in the graph that a trace
of each call would have added.
"""
