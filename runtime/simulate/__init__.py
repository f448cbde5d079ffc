"""Accelerators simulated on a CPU: real values, counted bytes, logged copies.

Input: capacities. Output: devices ``sim:0``, ``sim:1``, ... that torch accepts.
"""
