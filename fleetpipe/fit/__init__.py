"""A training loop over a pipeline, with the signatures of ``paddle.Model``.

Start at ``model.py``. ``feeding.py`` has what a loader yields on its way to micro-batches,
``criterion.py`` what the last stage computes for the loss and the metrics, ``epoch.py`` the loop,
``saved.py`` the files of ``Model.save``, ``callbacks.py`` what Paddle's callbacks need on ranks.
"""
