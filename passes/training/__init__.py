"""Rewrites of a training step that reduce its memory, and measurement of optimizer state.

Input: a capture of a forward and a backward pass. Output: one that repeats views of weights in the
backward pass, computes the loss in parts, recomputes parts of the forward pass, or keeps values in CPU memory
between the two; and the bytes that reside with each parameter.
"""
