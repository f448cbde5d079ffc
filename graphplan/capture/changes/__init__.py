"""What a call changes beside its result: attributes, buffers, and the lists and dicts that it is given.

In: a model and the arguments of its call, before and after a trace. Out: what the graph does of it, or why
it cannot.
"""
