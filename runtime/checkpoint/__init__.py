"""Checkpoint files: their weights are read, converted, or mapped into memory.

In: safetensors files. Out: bytes in memory that the caller provides, or tensors over mapped files.
"""
