"""Torch's tracer, for any model: ``torch.export``.

In: a copy of the model, and a call of it. Out: a :class:`~graphplan.capture.captured_graph.Capture`.
"""
