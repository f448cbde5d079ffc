"""What runs: placed modules, their weights, and simulated devices.

``module`` is what users call; ``fallback`` runs what has no graph, ``profile`` measures; ``weights``,
``checkpoint`` and ``memory`` hold the data; ``simulate`` has accelerators on the CPU.
"""
