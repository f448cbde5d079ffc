"""Memory of a device: allocations, pinned host pages, staging buffers, copy queues.

In: sizes. Out: tensors over one allocation. If an allocation fails, the error tells what the plan counted on.
"""
