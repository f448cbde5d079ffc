"""The module that users call.

In: programs of the compiler and a placed model. Out: results of calls. A call is dispatched by its structure
to a program, whose code is bound to the weights; the result has the structure that the model returns. What
the caller has changed since the model was placed is followed or refused.
"""
