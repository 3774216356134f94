"""A training loop over a pipeline, with the signatures of ``paddle.Model``.

Start at ``model.py``. ``given.py`` refuses what does not fit, ``sources.py`` is where batches come
from, ``feeding.py`` what a loader yields on its way to micro-batches. ``runner.py`` runs these,
with what ``criterion.py`` computes on the last stage for the loss and the metrics. ``training.py``
is the loop over epochs, ``epoch.py`` one pass, ``saved.py`` the files of ``Model.save``;
``callbacks/`` has a callback in each file.
"""
