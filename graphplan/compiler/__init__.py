"""From a bound call to a program: capture, annotate, constrain, slice, place, check, lower.

Input: a copy of the model, the devices, the caller's options, a call. Output: a plan and the program that
runs it. Later calls of the same model are planned around the weights that earlier plans have placed.
"""
