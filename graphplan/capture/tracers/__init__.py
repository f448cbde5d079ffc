"""The tracers: ``torch.export`` for any model, wrapped in ``transformers.exporters`` for transformers models.

Input: a copy of the model, and an example call. Output: a
:class:`~graphplan.capture.captured_graph.Capture`, or a NoGraphError that names what cannot be traced, such
as a custom backward pass.
"""
