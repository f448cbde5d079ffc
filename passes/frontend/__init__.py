"""Conversion of a captured fx graph to a :class:`~graphplan.ir.graph.Graph`.

Input: a capture. Output: its operations, values and weights with their bytes, FLOPs, aliases and workspaces;
and captures whose largest weights are read in slices.
"""
