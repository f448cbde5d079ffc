"""Devices: their keys, budgets and links, and how fast they are.

In: ``max_memory``, links and speeds as the caller gives them, or this machine. Out: a
:class:`~graphplan.devices.topology.Topology`. The books of simulated devices are here too: what asks for the
machine that is current need not know of tensors on it.
"""
