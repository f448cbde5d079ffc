"""Which sizes of inputs may vary.

In: example inputs, dynamic shapes, limits. Out: what a trace leaves open.
"""
