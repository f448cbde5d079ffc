"""Reports of a plan for people and other programs: text, HTML page, pictures, files for other viewers.

Input: a plan, and a measured call if there is one. Output: text.
"""
