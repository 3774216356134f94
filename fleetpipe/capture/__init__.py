"""Makes a pipeline of any ``nn.Layer``: captures its forward, cuts it into stages, proves it.

Start with ``api.py``. ``tracing/`` makes a capture: it runs ``forward`` once in dynamic graph, and
records every call of a sublayer and every operation outside of one; ``value.py`` there defines a
capture. ``cutting/`` chooses where the stages begin. ``running/`` repeats the recorded calls stage
by stage, so that the kernels and the order in which autograd adds up are those of the plain model.
``proof/`` compares the two.
"""
