"""The module that users call.

Input: programs of the compiler and a placed model. Output: results of forward passes. A call is dispatched
by its structure to a program, whose code is bound to the weights; the result has the structure of the
model's own. Changes of the model since it was placed are followed or refused.
"""
