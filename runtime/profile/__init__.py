"""Measure one forward pass or training step of a placed module, and the speeds of this machine.

In: a program, or devices. Out: seconds and bytes.
"""
