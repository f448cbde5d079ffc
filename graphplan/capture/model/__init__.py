"""The model that is traced: a copy on meta, its weights and modes.

In: the caller's module. Out: a :class:`~graphplan.capture.model.model_copy.ModelCopy`.
"""
