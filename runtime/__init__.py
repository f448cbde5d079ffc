"""What runs: placed modules, their weights, and simulated devices."""
