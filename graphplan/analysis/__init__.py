"""Questions to a plan: why something is where it is, what limits it, what would help.

In: a plan. Out: plain results that print themselves.
"""
