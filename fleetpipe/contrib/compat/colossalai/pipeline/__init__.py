"""``colossalai.pipeline``: a model that is made without memory, put in order, cut and filled."""
