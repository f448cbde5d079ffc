"""Other libraries: what accelerate and transformers do beside calling a model."""
