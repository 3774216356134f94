"""Connects ranks: how they find each other and open their sockets.

Start with ``connections.py``. In ``handshake.py`` ranks look each other up and prove who they are;
``hosts.py`` finds their addresses.
"""
