"""The families of schedules: each is a pure function from sizes to rows of actions.

A new family is a function, in one of these files or its own, and one line in ``table.py``. They
import values alone; the registry imports the table.
"""
