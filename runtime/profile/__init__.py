"""Measure one forward pass or training step of a placed module, and the speeds of this machine.

Input: a program, or devices. Output: seconds and bytes.
"""
