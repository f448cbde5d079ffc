"""The ``graphplan`` command; needs the ``cli`` extra.

In: arguments of a command line. Out: calls of the API, results on stdout, exit codes.
"""
