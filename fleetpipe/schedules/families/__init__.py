"""The families of schedules: one file each, a pure function from sizes to rows of actions.

A new family is one file here and one line in ``table.py``. They import values alone; the search and
the registry import the table.
"""
