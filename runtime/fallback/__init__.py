"""Forward passes without a graph: they run module by module.

In: a model and the device of each module. Out: results of forward passes.
"""
