"""The public functions, such as ``plan``, ``partition`` and ``load``.

Input: a model or a checkpoint folder, ``max_memory`` and example inputs. Output: a plan, or a module that
runs it. Arguments are read and checked here, once.
"""
