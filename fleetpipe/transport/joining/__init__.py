"""How ranks find each other and become a mesh of connections.

Start with ``mesh.py``. ``rendezvous.py`` is where they look each other up, ``handshake.py`` how
they prove who they are, ``hosts.py`` at which addresses.
"""
