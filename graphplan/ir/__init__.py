"""The planner's intermediate representation: graph, schedule, memory, time, and their checks.

Nothing here depends on ``torch.fx``, on a search or on a file format but JSON. Input: a graph and an
assignment, from the passes. Output: bytes and seconds at every step.
"""
