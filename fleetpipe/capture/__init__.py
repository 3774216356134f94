"""Any ``nn.Layer`` as a pipeline: captured as nodes and edges, cut into stages, and proved.

``value.py`` says what a capture is. ``tracer.py`` makes one: it runs ``forward`` once in dynamic
graph, and notes every call of a sublayer and every operation outside of one. ``replay.py`` does the
same calls again, a stage at a time; so the kernels, and the order in which autograd adds up, are
those of the plain model.
"""

from __future__ import annotations
