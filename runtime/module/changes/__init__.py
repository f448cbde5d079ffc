"""What a caller changes in a placed module: attributes, submodules, weights.

In: the module at a call. Out: what has changed since it was placed, to be followed or refused.
"""
