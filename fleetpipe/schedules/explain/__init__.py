"""Who is to blame, in words: for a schedule that is not complete, or cannot go on.

It imports values alone; players, checks and forms use it when they refuse something.
"""
