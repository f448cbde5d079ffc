"""transformers: the forward passes that ``generate`` makes, and the rules of its checkpoints.

In: a compiler and one example, or the names of tensors in files. Out: plans with memory for decode steps, or
the conversion that makes each weight.
"""
