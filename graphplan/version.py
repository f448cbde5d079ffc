"""The version that ranks, plans and saved captures are compared by.

Not read from the installed package: a checkout on ``PYTHONPATH`` has none.
"""

__version__ = "0.1.0"
