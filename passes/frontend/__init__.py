"""A captured fx graph becomes a :class:`~graphplan.ir.graph.Graph`.

In: a capture. Out: its operations, values and weights with their bytes, FLOPs, aliases and workspaces; and
captures whose largest weights are read in slices.
"""
