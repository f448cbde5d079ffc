"""Blocks of a stack that are alike, of which one trace serves all.

What enters are the calls of modules while a model is traced; what leaves are their results, and in the graph
what a trace of each call would have left.
"""
