"""``fleetpipe doctor``: what this machine can do, what it measured, and what is wrong with it.

Start with ``command.py``. ``host.py`` looks without Paddle, ``device.py`` at Paddle and its device;
``ranks.py`` starts some ranks of ``worker.py``, which measure each transport and compare bits;
``cluster.py`` looks at the nodes of a Ray cluster.
"""
