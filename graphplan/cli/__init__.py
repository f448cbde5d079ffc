"""The ``graphplan`` command; needs the ``cli`` extra.

Input: arguments of a command line. Output: calls of the API, results on stdout, exit codes.
"""
