"""The model that is traced: a copy with stand-ins for its weights, its modes, and data in its attributes.

Input: the caller's module. Output: a :class:`~graphplan.capture.model.model_copy.ModelCopy`.
"""
