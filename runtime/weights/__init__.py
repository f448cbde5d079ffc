"""Place weights on their devices, and stream the others to them.

Input: a model or checkpoint, and the device of each weight. Output: placed parameters, prefetch buffers, and
the copies into them.
"""
