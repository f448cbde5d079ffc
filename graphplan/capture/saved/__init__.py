"""Captures in a folder that the user names, for later processes.

What enters is a capture and a description of all that it came from; what leaves is the same capture, in a
process where the description is the same.
"""
