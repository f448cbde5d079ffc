"""Torch's tracers, for any model: ``torch.export``, and ``torch.fx.symbolic_trace`` without example inputs.

In: a copy of the model, and a call of it. Out: a :class:`~graphplan.capture.captured_graph.Capture`.
"""
