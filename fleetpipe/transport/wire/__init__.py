"""What a message is in bytes: its header, the structure of its value, the data of its tensors.

Start with ``message.py``. Used by the sockets, and by what crosses between stages in other ways.
"""
