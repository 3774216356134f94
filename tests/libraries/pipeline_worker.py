"""Trains the library's pipeline class in every form, in as many processes as there are."""

import fleetpipe

fleetpipe.install()

import json  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import paddle  # noqa: E402
from paddle.distributed import fleet  # noqa: E402

from tests.libraries.models import (  # noqa: E402
    MICRO_BATCHES,
    ROWS,
    adamw,
    batches,
    class_of,
)

FORMS: dict[str, dict[str, Any]] = {
    "pp 2": {},
    "virtual 2": {"virtual_pp_degree": 2},
    "recompute": {"recompute": True, "recompute_granularity": "full"},
}


def train(name: str, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the loss of each step, and what tells that the form was that which was asked for."""
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": 1, "pp_degree": 2}
    strategy.pipeline_configs = {"accumulate_steps": MICRO_BATCHES, "micro_batch_size": ROWS}
    fleet.init(is_collective=True, strategy=strategy)
    try:
        kind, recompute = class_of(name, "ForCausalLMPipe"), options.get("recompute", False)
        config = class_of(name, "Config").from_pretrained(f"{folder}/{name}")
        for option, value in options.items():
            setattr(config, option, value)
        model = kind.from_pretrained(f"{folder}/{name}", config=config)
        if recompute:
            model.recompute_enable()
        pipe = fleet.distributed_model(model)
        optimizer = fleet.distributed_optimizer(adamw(model.parameters()))
        rows = [paddle.to_tensor(tokens) for tokens in batches()]
        attentions = [
            part for part in model.sublayers() if type(part).__name__.endswith("Attention")
        ]
        calls: list[None] = []
        for attention in attentions:
            attention.register_forward_pre_hook(lambda *_: calls.append(None))
        return {
            "losses": [float(pipe.train_batch([r[:, :-1], r[:, 1:]], optimizer)) for r in rows],
            "chunks": pipe.num_model_chunks,
            # How often an attention runs in a micro-batch: twice where it is recomputed.
            "runs": len(calls) / (len(attentions) * MICRO_BATCHES * len(rows)),
        }
    finally:
        fleet.shutdown()


folder, file, *names = sys.argv[1:]
found = {
    name: {form: train(name, folder, options) for form, options in FORMS.items()} for name in names
}
if paddle.distributed.get_rank() == 0:
    Path(folder, file).write_text(json.dumps(found))
