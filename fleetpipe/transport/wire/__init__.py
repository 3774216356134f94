"""The bytes of a message: its header, the structure of its value, the data of its tensors.

Start with ``message.py``. Sockets use it, and process groups too.
"""
