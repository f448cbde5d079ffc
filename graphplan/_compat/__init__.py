"""The private names of torch and transformers that graphplan uses: one function for each, and no others.

The files say with which versions they were tested; where a name is gone, :class:`graphplan.GraphplanError` is
raised.
"""
