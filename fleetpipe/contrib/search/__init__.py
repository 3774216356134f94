"""The schedule named auto: a greedy search over orders of F and I, and over places for W.

Begin with ``auto.py``. It imports values, the table of the families and players; the registry alone
imports it.
"""
