"""Features of accelerate and transformers beside forward passes: device maps, checkpoints, ``generate``."""
