"""Memory of a device: allocations, pinned host pages, staging buffers, copy queues.

In: sizes. Out: tensors over one allocation, and errors that say what was promised where an allocation fails.
"""
