"""Checkpoints of no layout, written and read by all ranks of a job.

Start with ``manager.py``, what users call. ``contents/`` has what is saved: a model and an
optimizer are :mod:`parts <fleetpipe.checkpoint.contents.parts>`, tensors under lasting names, of
which each rank holds some: :mod:`fleetpipe.mesh.parts` says how. ``files/`` has what is written:
``plan.py`` says which of them stands where and who writes it, ``tensors.py`` is the format of one
file, ``manifest.py`` what makes a folder whole, and ``run_folder.py`` how it appears at once, and
which are kept. ``commands.py`` looks at checkpoints without a job, compares and converts them.
"""
