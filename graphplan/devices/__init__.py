"""Devices: their keys, budgets, links and speeds.

Input: ``max_memory``, links and speeds as the caller gives them, or this machine. Output: a
:class:`~graphplan.devices.topology.Topology`. The byte counts of simulated devices are here too, so that the
current machine is known without the runtime that simulates tensors.
"""
