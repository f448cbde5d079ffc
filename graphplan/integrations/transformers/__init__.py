"""transformers: the forward passes of ``generate``, and the rules of its checkpoints.

Input: a compiler and one example, or the names of tensors in files. Output: plans with memory for decode
steps, or the conversion that makes each weight.
"""
