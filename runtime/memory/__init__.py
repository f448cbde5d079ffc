"""Memory of a device: allocations, pinned host pages, staging buffers, copy queues.

Input: sizes. Output: tensors over one allocation. If an allocation fails, the error states the planned bytes.
"""
