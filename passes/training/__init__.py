"""A training step in one graph is rewritten to take less memory, and what an optimizer keeps is measured.

In: a capture of a forward and a backward pass. Out: one that reads weights anew in the backward pass,
computes parts of the forward pass again, or keeps values in CPU memory between the two; and the bytes that
reside with each parameter.
"""
