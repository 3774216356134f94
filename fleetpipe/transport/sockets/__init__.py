"""Messages between processes over sockets: one stream to each peer, waited on together.

Start with ``transport.py``; ``connection.py`` is one peer's stream, with its ``inbox``.
"""
