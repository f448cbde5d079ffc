"""Measurement: one call of a placed module, and this machine.

In: a program, or devices. Out: seconds and bytes.
"""
