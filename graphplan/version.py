"""The version, which must be equal on all ranks and in saved captures.

It is not read from the installed package: a checkout on ``PYTHONPATH`` has none.
"""

__version__ = "0.1.0"
