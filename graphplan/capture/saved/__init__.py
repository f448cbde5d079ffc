"""Captures saved in a user's folder for later processes.

Input: a capture, and a hash of all that determines it. Output: the same capture, in a process with the same
hash.
"""
