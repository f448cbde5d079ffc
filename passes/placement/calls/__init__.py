"""Several forward passes over one placement of the weights. Input: a problem for each. Output: solutions."""
