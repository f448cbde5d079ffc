"""The model that is traced: a copy with stand-ins for its weights, its modes, and data in its attributes.

In: the caller's module. Out: a :class:`~graphplan.capture.model.model_copy.ModelCopy`.
"""
