"""Trains PaddleFormers' pipeline class in the forms that are asked for, on all ranks there are."""

import fleetpipe

fleetpipe.install()

import json  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import paddle  # noqa: E402
from paddle.distributed import fleet  # noqa: E402

from tests.libraries.formers.models import (  # noqa: E402
    PLAIN,
    causal_mask,
    class_of,
    labels_of,
    version,
)
from tests.libraries.models import MICRO_BATCHES, ROWS, adamw, batches  # noqa: E402

OLD = version() == "0.4.1"
#: By form, the degrees beside pp_degree 2, and options of the configuration.
FORMS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "pp 2": ({}, {}),
    "virtual 2": ({}, {"virtual_pipeline_model_parallel_size": 2}),
    "recompute": (
        {},
        {
            **({"recompute": True} if OLD else {}),
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    ),
    "mp 2": ({"mp_degree": 2}, {"tensor_model_parallel_size": 2, "tensor_parallel_output": True}),
    "sharding 2": ({"sharding_degree": 2}, {}),
}


def train(name: str, folder: str, form: str) -> dict[str, Any]:
    """Returns the loss of each step, and what tells that the form was that which was asked for."""
    degrees, options = FORMS[form]
    replicas = degrees.get("sharding_degree", 1)
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": 1, "pp_degree": 2, **degrees}
    steps = MICRO_BATCHES // replicas
    strategy.pipeline_configs = {"accumulate_steps": steps, "micro_batch_size": ROWS}
    fleet.init(is_collective=True, strategy=strategy)
    try:
        hcg = fleet.get_hybrid_communicate_group()
        config = class_of(name, "Config").from_pretrained(f"{folder}/{name}")
        config.dtype = "float32"
        for option, value in options.items():
            setattr(config, option, value)
        if "mp_degree" in degrees:
            config.tensor_parallel_rank = hcg.get_model_parallel_rank()
        kind = class_of(name, "ForCausalLMPipe")
        model = kind.from_pretrained(f"{folder}/{name}", config=config, dtype="float32")
        pipe = fleet.distributed_model(model)
        optimizer = fleet.distributed_optimizer(adamw(model.parameters()))
        layers = [part for part in model.sublayers() if "DecoderLayer" in type(part).__name__]
        calls: list[None] = []
        for layer in layers:
            layer.self_attn.register_forward_pre_hook(lambda *_: calls.append(None))
        share = hcg.get_sharding_parallel_rank() if replicas > 1 else 0
        mask = paddle.to_tensor(causal_mask(steps * ROWS))
        losses = []
        for tokens in batches():
            rows = paddle.to_tensor(tokens[share * steps * ROWS : (share + 1) * steps * ROWS])
            batch = [(rows[:, :-1], mask), labels_of(name, rows[:, 1:])]
            losses.append(pipe.train_batch(batch, optimizer))
        if replicas > 1:
            for loss in losses:
                paddle.distributed.all_reduce(loss)
        counted = paddle.distributed.get_world_size() if replicas > 1 else 1
        return {
            "losses": [float(loss) / counted for loss in losses],
            "chunks": pipe.num_model_chunks,
            # How often an attention runs in a micro-batch: twice where it is recomputed.
            "runs": len(calls) / (len(layers) * steps * len(losses)),
            "parameters": int(sum(parameter.size for parameter in model.parameters())),
        }
    finally:
        fleet.shutdown()


folder, file, forms, *names = sys.argv[1:]
found = {
    name: {
        form: train(name, folder, form)
        for form in forms.split(",")
        if form == "pp 2" or name not in PLAIN
    }
    for name in names
}
if paddle.distributed.get_rank() == 0:
    Path(folder, file).write_text(json.dumps(found))
