"""What all other rooms speak of: graph, schedule, memory, time, and the checks of them.

Nothing here knows of ``torch.fx``, of a search or of a file format but JSON. A graph and an assignment come
in from the passes; bytes and seconds at every step go out.
"""
