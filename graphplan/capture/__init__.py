"""Tracing of a module's forward pass into a flat ``torch.fx`` graph.

Input: a module and example inputs. Output: a :class:`~graphplan.capture.captured_graph.Capture`: the graph
over named weights, the signature of the calls that it serves, and the bounds of its dynamic sizes.
"""
