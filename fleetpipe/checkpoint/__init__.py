"""Checkpoints that any layout can restore, written and read by all ranks of a job.

Start with ``manager.py``, which users call; ``saving.py`` and ``restoring.py`` do its work.
``contents/`` describes the state to save: a model and an optimizer are
:mod:`parts <fleetpipe.checkpoint.contents.parts>`, tensors under fully qualified names, of which
each rank has some, as :mod:`fleetpipe.mesh.parts` describes. ``files/`` writes and reads:
``tensors.py`` chooses the writer of each tensor and defines the format of one file, ``manifest.py``
describes the folder of a step, and ``run_folder.py`` publishes and removes steps.
``checkpoint_commands.py`` shows, compares and converts checkpoints without a job.
"""
