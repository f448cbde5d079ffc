"""Several calls of one model over one placement of its weights. In: a problem for each. Out: solutions."""
