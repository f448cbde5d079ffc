"""Side effects of a call: changed attributes, buffers, and lists and dicts among its arguments.

Input: a model and the arguments of its call, before and after a trace. Output: the graph's updates of this
state, or the reason why a graph cannot make them.
"""
