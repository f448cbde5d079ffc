"""Checkpoint files: their weights are read, converted, or mapped into memory.

Input: safetensors files. Output: bytes in memory that the caller provides, or tensors over mapped files.
"""
