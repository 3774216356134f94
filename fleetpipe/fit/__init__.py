"""A training loop over a pipeline, with the signatures of ``paddle.Model``.

Start at ``model.py``. ``arguments.py`` refuses what does not fit, ``sources.py`` is where batches
come from, ``feeding.py`` cuts a loader's batch into micro-batches. ``runner.py`` runs these, with
what ``criterion.py`` computes on the last stage for the loss and the metrics. ``loop.py`` is the
loop over epochs and batches, ``position.py`` its place in the data, ``saving.py`` the files of
``Model.save``; ``callbacks/`` has a callback in each file.
"""
