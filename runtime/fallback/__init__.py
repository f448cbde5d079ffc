"""Forward passes without a graph: they run module by module.

Input: a model and the device of each module. Output: results of forward passes.
"""
