"""The parameters and buffers of the whole model: their lasting names, their files, their copies.

Start with ``names.py``.

Entered by: ``files``, ``layer_in_parts``, ``names``, ``single_model``, ``tied_weights``,
``whole_state``.
"""
