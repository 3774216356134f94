"""Trains a pipeline by the methods of ``paddle.Model``: ``fit``, ``evaluate`` and ``predict``.

Start with ``model.py``. ``arguments.py`` checks users' arguments, ``networks.py`` makes a pipeline
of the network, and ``micro_batches.py`` cuts a loader's batch. ``runner.py`` runs the micro-batches
and computes the loss and the metrics on the last stage. ``loop.py`` is the loop over epochs and
batches, ``position.py`` its position in the data; ``callbacks/`` has the callbacks.
"""
