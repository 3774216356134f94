"""Sends tensors by Paddle's process groups: ``isend`` and ``irecv`` of Gloo or NCCL.

Start with ``transport.py``; ``outgoing.py`` and ``incoming.py`` are the two directions of a peer.
"""
