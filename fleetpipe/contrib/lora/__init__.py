"""LoRA (arXiv:2106.09685): trains two small factors beside each of some frozen linear layers.

Put adapters into a list of layers, or into a plain model, before a pipeline is made of it::

    layers = lora.adapt(layers, targets=["qkv", "projection"], rank=8, alpha=16)
    model = fleet.distributed_model(PipelineLayer(layers, topology=.., loss_fn=..))
    manager.save(step, model=lora.TrainedPart(model), optimizer=optimizer)
    merged = lora.merge(plain)
"""

from __future__ import annotations

from fleetpipe.contrib.lora.adapters import adapt, merge
from fleetpipe.contrib.lora.parts import BasePart, TrainedPart

__all__ = ["BasePart", "TrainedPart", "adapt", "merge"]
