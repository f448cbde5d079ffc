"""A schedule becomes an fx graph that runs.

In: a capture and a schedule. Out: generated code whose moves are nodes, its calls specialised, its devices
proven.
"""
