"""Several machines: cut a model into stages, and compile each stage by itself.

Input: an annotated capture and the machines. Output: a plan of all machines, and the captures of the stages.
"""
