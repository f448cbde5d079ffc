"""What a caller changes in a placed module: attributes, submodules, weights. It is followed, or refused."""
