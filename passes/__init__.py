"""Passes: each takes a graph, a placement or a lowered module one step further.

``frontend`` makes a captured graph a :class:`~graphplan.ir.graph.Graph`, ``training`` rewrites training
steps, ``placement`` decides where
everything is, ``schedule`` makes every transfer explicit, ``lowering`` turns a schedule back into
``torch.fx``.
"""
