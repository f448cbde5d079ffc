"""A model over several processes of torchrun: what each runs, and what they tell each other.

In: a placed stage and a process group. Out: a module that every process calls alike. Between processes there
are tensors only, and texts as tensors of bytes: nothing is unpickled.
"""
