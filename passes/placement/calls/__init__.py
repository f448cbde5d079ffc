"""Several forward passes over one placement of the weights. In: a problem for each. Out: solutions."""
