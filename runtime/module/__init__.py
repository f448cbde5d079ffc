"""The module that users call.

In: programs of the compiler and a placed model. Out: results of forward passes. A call is dispatched by its
structure to a program, whose code is bound to the weights; the result has the structure that the model
returns. Changes of the model since it was placed are followed or refused.
"""
