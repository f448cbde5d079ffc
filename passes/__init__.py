"""Passes: each takes a graph, a placement or a lowered module one step further. One file each."""
