"""accelerate: device maps of modules, and models that are placed by such a map.

In: a model that cannot be traced, or one to compare plans for. Out: a device map, or a module run by hooks.
"""
