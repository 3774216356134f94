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
    JOBS,
    MICRO_BATCHES,
    MODELS,
    ROWS,
    Form,
    adamw,
    batches,
    class_of,
)


def train(name: str, folder: str, form: Form) -> dict[str, Any]:
    """Returns the loss of each step, and what tells that the form was that which was asked for."""
    micro_batches = MICRO_BATCHES // form.replicas
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": 1, "pp_degree": 2, **form.degrees}
    strategy.pipeline_configs = {"accumulate_steps": micro_batches, "micro_batch_size": ROWS}
    fleet.init(is_collective=True, strategy=strategy)
    try:
        model = class_of(name, "ForCausalLMPipe").from_pretrained(
            f"{folder}/{name}", config=configured(name, folder, form)
        )
        if form.options.get("recompute"):
            model.recompute_enable()
        pipe = fleet.distributed_model(model)
        optimizer = fleet.distributed_optimizer(adamw(model.parameters()))
        replica = pipe.replicas.rank
        rows = [paddle.to_tensor(tokens).split(form.replicas)[replica] for tokens in batches()]
        attentions = [
            part for part in model.sublayers() if type(part).__name__.endswith("Attention")
        ]
        calls: list[None] = []
        for attention in attentions:
            attention.register_forward_pre_hook(lambda *_: calls.append(None))
        losses = [float(pipe.train_batch([r[:, :-1], r[:, 1:]], optimizer)) for r in rows]
        states = [state for state in optimizer.state_dict() if "moment1" in state]
        return {
            "losses": losses,
            "chunks": pipe.num_model_chunks,
            "replicas": pipe.replicas.ranks,
            "runs": len(calls) / (len(attentions) * micro_batches * len(rows)),
            "slices": any(parameter.is_distributed for parameter in model.parameters()),
            "all states": len(states) == len(model.parameters()),
        }
    finally:
        fleet.shutdown()


def configured(name: str, folder: str, form: Form) -> Any:
    """Returns the model's configuration, as a script makes it for a form."""
    topology = fleet.get_hybrid_communicate_group()
    config = class_of(name, "Config").from_pretrained(f"{folder}/{name}")
    options = {
        **form.options,
        "tensor_parallel_degree": topology.get_model_parallel_world_size(),
        "tensor_parallel_rank": topology.get_model_parallel_rank(),
    }
    for option, value in options.items():
        setattr(config, option, value)
    return config


folder, job, *names = sys.argv[1:]
found = {
    name: {
        key: train(name, folder, form)
        for key, form in JOBS[job].forms.items()
        if key not in MODELS[name].lacks
    }
    for name in names
}
if paddle.distributed.get_rank() == 0:
    Path(folder, f"{job}.json").write_text(json.dumps(found))
