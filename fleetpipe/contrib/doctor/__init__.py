"""``fleetpipe doctor``: what this machine can do, what it measured, and what is wrong with it.

Start with ``command.py``. It looks at Paddle and its device, ``host.py`` without Paddle;
``ranks.py`` starts some ranks of ``worker.py``, which measure each transport and compare bits;
``cluster.py`` looks at the nodes of a Ray cluster.
"""
