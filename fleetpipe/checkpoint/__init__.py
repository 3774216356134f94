"""Checkpoints of no layout, written and read by all ranks of a job; and the files of Fleet.

Start with ``manager.py``, what users call. ``contents/`` has what is saved: a model and an
optimizer are :mod:`parts <fleetpipe.checkpoint.contents.parts>`, tensors under lasting names, of
which each rank holds some. ``files/`` has what is written: ``plan.py`` says which of them stands
where and who writes it, ``tensors.py`` is the format of one file, ``manifest.py`` what makes a
folder whole, and ``run_folder.py`` how it appears at once, and which are kept. ``commands.py``
looks at checkpoints without a job, compares and converts them.

Entered by: ``contents.layer_and_optimizer``, ``contents.objects``, ``contents.parts``,
``contents.training_state``, ``contents.whole_parts``, ``files.host_memory``, ``files.plan``,
``files.tensors``, ``fleet_files``, ``formats.contents``, ``formats.load``, ``layer_manifest``,
``manager``, ``ranks``, ``restoring``, ``saving``.
"""
