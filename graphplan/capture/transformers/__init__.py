"""Capture of transformers models: its exporter, caches, and layers that no plain trace takes.

In: a transformers model and a call. Out: an exported program with dynamic batch and length.
"""
