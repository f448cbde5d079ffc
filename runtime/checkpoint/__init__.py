"""Weights in files: what a checkpoint holds, read, converted or mapped.

In: safetensors files. Out: bytes in the memory that the caller gives, or tensors over mapped files.
"""
