"""Several machines as data: their stages, the microbatches on their way, and the plan of all.

In and out: what the cut finds, what ranks agree on, what reports show.
"""
