"""The tracers: ``torch.export`` for any model, with ``transformers.exporters`` around it for transformers'.

In: a copy of the model, and a call of it. Out: a :class:`~graphplan.capture.captured_graph.Capture`, or a
NoGraphError that says what in the model no trace keeps, such as a backward pass of its own.
"""
