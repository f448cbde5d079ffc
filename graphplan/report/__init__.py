"""A plan for people and other programs: text, HTML page, pictures, files of other viewers.

In: a plan, and a measured call where there is one. Out: text.
"""
