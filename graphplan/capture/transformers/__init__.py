"""What a trace of a transformers model needs: its caches, its masks, and layers that no plain trace takes.

In: the values and modules of a transformers model. Out: what a tracer, and a plan, can look into.
"""
