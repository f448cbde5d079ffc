"""Run a model over several torchrun processes: the stages of each, and the messages between them.

Input: a placed stage and a process group. Output: a module that every process calls alike. Processes
exchange only tensors, and texts as tensors of bytes: nothing is unpickled.
"""
