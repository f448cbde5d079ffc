"""Several machines as data: their stages, the microbatches in flight, and the plan of all machines.

The search for cuts makes these data, ranks agree on them, and reports show them.
"""
