"""Pipeline stages: cuts of the order of operations into contiguous stages, one or more for each machine.

Input: a graph, the machines, the network. Output: cuts, with a lower bound on all other cuts; and the capture
of a stage, which the other packages place and lower like that of a whole model.
"""
