"""Which sizes of inputs may vary.

In: example inputs, dynamic shapes, limits. Out: the sizes that stay symbols in a trace, with their bounds.
"""
