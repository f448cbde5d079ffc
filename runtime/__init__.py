"""The runtime: placed modules, their weights, and simulated devices.

``module`` has the module that users call; ``fallback`` runs models without a graph, ``distributed`` several
processes; ``profile`` measures; ``weights``, ``checkpoint`` and ``memory`` hold the data; ``simulate`` has
accelerators on the CPU.
"""
