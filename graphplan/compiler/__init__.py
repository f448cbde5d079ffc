"""From a bound call to a program: capture, annotate, constrain, slice, place, check, lower.

In: a model's copy, the devices, the caller's options, a call. Out: a plan and the program that runs it.
Later calls of the same model are planned around what earlier plans have placed.
"""
