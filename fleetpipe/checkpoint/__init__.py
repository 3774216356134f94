"""Files of parameters and optimizer state: read without running what they name.

Start with ``fleet_files.py``. Both graph modes save and load through it.
"""
