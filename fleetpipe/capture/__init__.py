"""Any ``nn.Layer`` as a pipeline: captured as nodes and edges, cut into stages, and proved.

Start with ``api.py``. ``tracing/`` makes a capture: it runs ``forward`` once in dynamic graph, and
notes every call of a sublayer and every operation outside of one; ``value.py`` there says what a
capture is. ``cutting/`` says where the stages begin. ``running/`` does the same calls again, a
stage at a time; so the kernels, and the order in which autograd adds up, are those of the plain
model. ``proof/`` compares the two.
"""
