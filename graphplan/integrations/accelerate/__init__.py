"""accelerate: device maps of modules, and models that are placed by such a map.

Input: a model that cannot be traced, or one to compare plans for. Output: a device map, or a module run by
hooks.
"""
