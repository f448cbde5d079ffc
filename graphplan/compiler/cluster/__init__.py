"""Several machines: where a model is cut, and each stage compiled by itself.

In: an annotated capture and the machines. Out: a plan of all, and the captures of stages.
"""
