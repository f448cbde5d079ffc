"""accelerate: device maps of modules, and the modules that its hooks run.

In: a model that has no graph, or one to compare with. Out: a device map, and a module that hooks run.
"""
