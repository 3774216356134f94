"""``colossalai.pipeline``: makes a model without memory, cuts it, and fills its stages."""
