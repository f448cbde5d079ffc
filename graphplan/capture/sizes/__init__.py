"""Dynamic sizes of inputs.

Input: example inputs, dynamic shapes, limits. Output: the sizes that stay symbols in a trace, with their
bounds.
"""
