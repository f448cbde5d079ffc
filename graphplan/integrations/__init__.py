"""Features of accelerate and transformers besides forward passes: device maps, checkpoints, ``generate``."""
