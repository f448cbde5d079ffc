"""Calls that have no graph: run module by module.

In: a model and the device of each module. Out: results of calls.
"""
