"""Conversion of a schedule to an executable fx graph.

Input: a capture and a schedule. Output: generated code in which transfers are nodes, calls are specialised
and devices are verified.
"""
