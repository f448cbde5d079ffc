"""accelerate: device maps of modules, and models that are placed by one.

In: a model that has no graph, or one to compare with. Out: a device map, and a module that hooks run.
"""
