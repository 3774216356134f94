"""How ranks find each other and are all connected.

Start with ``connections.py``. ``handshake.py`` is how they look each other up and prove who they
are, ``hosts.py`` at which addresses.
"""
