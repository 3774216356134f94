"""How ranks find each other and are all connected.

Start with ``connections.py``. ``rendezvous.py`` is where they look each other up, ``handshake.py``
how they prove who they are, ``hosts.py`` at which addresses.
"""
