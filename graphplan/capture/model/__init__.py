"""The model that is traced: a copy on meta, its weights, modes, and the data in its attributes.

In: the caller's module. Out: a :class:`~graphplan.capture.model.model_copy.ModelCopy`.
"""
