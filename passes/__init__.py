"""Passes: each takes a graph, a placement or a lowered module one step further.

``frontend`` converts a captured graph to a :class:`~graphplan.ir.graph.Graph`, ``training`` rewrites training
steps, ``placement`` assigns operations and weights to devices, ``schedule`` makes every transfer explicit,
``pipeline`` cuts a model into stages, and ``lowering`` turns a schedule back into ``torch.fx``.
"""
