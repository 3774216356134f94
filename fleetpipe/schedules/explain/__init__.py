"""Who is to blame, in words: for a schedule that is not complete, or cannot go on.

Imports values alone; the checks use it when they refuse something.
"""
