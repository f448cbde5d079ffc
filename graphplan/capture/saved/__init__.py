"""Captures saved in a user's folder for later processes.

In: a capture, and a hash of all that determines it. Out: the same capture, in a process with the same hash.
"""
