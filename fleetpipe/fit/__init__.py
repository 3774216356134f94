"""A training loop over a pipeline, with the signatures of ``paddle.Model``.

Start at ``model.py``. ``arguments.py`` checks users' arguments, ``sources.py`` yields batches,
``feeding.py`` cuts a loader's batch into micro-batches. ``runner.py`` runs these; ``criterion.py``
computes the loss and the metrics on the last stage. ``loop.py`` is the loop over epochs and
batches, ``position.py`` its position in the data, ``saving.py`` writes the files of ``Model.save``;
``callbacks/`` has a callback in each file.
"""
