"""Pipeline stages: where the order of operations is cut, one stretch for each machine.

In: a graph, the machines, the network. Out: cuts, with a bound on how much better others could be; and the
capture of a stage, which the other rooms place and lower as they do a whole model's.
"""
