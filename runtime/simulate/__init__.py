"""Accelerators simulated on a CPU: real values, counted bytes, logged copies.

In: capacities. Out: devices ``sim:0``, ``sim:1``, ... that torch accepts.
"""
