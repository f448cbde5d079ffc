"""Weights on their devices, and those that are streamed to them.

In: a model or checkpoint, and where each weight resides. Out: placed parameters, prefetch buffers, and the
copies into them.
"""
