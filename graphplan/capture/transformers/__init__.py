"""Support for traces of transformers models: caches, masks, and layers that cannot be traced as they are.

Input: the arguments and modules of a transformers model. Output: pytree nodes and patches for tracers and
plans.
"""
