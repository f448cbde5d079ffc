"""Place weights on their devices, and stream the others to them.

In: a model or checkpoint, and the device of each weight. Out: placed parameters, prefetch buffers, and the
copies into them.
"""
