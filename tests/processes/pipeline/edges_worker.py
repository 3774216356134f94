"""A rank that is given its own data alone: what comes back on 2 ranks, or in one process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import paddle
from paddle import nn

from fleetpipe import fleet
from fleetpipe.dygraph import VocabularyHead, VocabularyLoss
from fleetpipe.fleet.meta_parallel import LayerDesc, PipelineLayer, SharedLayerDesc
from tests.jobs import begin
from tests.pipelines import ROWS, batch, job, mlp_layers, model_in_job, pipeline, sgd

RANK = int(os.environ.get("PADDLE_TRAINER_ID", "0"))
ALONE = "PADDLE_TRAINER_ID" not in os.environ


def given(inputs: Any, labels: Any) -> Any:
    """Leaves out what this rank of a loop does not need."""
    if ALONE:
        return [inputs, labels]
    return [inputs, None] if RANK == 0 else [None, labels]


def wide(output: Any, label: Any) -> Any:
    return nn.functional.cross_entropy(output, label).astype("float64").reshape([1]) * 3


def told(tensor: Any) -> list[Any]:
    return [tensor.shape, str(tensor.dtype), tensor.numpy().tobytes().hex(), tensor.stop_gradient]


def of_losses() -> Any:
    """Losses whose shape and dtype only the last stage can know."""
    with model_in_job(2, loss_fn=[nn.CrossEntropyLoss(), wide]) as model:
        data = given(*batch())
        evaluated = model.eval_batch(data, compute_loss=True)
        trained = model.train_batch(data, sgd(model), loss_fn_idx=1)
        apart = model.train_batch(data, sgd(model), return_micro_batch_loss=True)
        return [told(loss) for loss in (*evaluated, *trained, *apart)]


def of_iterators() -> Any:
    """Each rank's own iterator gives one item for each micro-batch."""
    taken: list[int] = []

    def items() -> Iterator[Any]:
        for seed in range(12):
            taken.append(seed)
            yield tuple(given(*batch(1, seed)))

    with model_in_job(2) as model:
        optimizer, source, counts = sgd(model), items(), []
        losses = []
        for _ in range(2):
            losses.append(told(model.train_batch(source, optimizer)))
            counts.append(len(taken))
        losses.append(told(model.eval_batch(source, compute_loss=True)))
        return losses, [*counts, len(taken)]


def of_a_vee() -> Any:
    """Rank 0 has the first and the last stage; rank 1 needs no data at all."""
    with model_in_job(2, schedule="DualPipeV") as model:
        inputs, labels = batch()
        data = [inputs, labels] if RANK == 0 else None
        losses = [told(model.train_batch(data, sgd(model))) for _ in range(2)]
        evaluated = told(model.eval_batch(data, compute_loss=True))
        outputs = model.eval_batch(data)
        assert [output.shape for output in outputs] == ([[ROWS, 4]] * 4 if RANK == 0 else [])
        return losses, evaluated


def of_a_head() -> Any:
    """The parts of a head get labels from the last rank, and the norm counts each once."""
    layers = [*mlp_layers()[:-1], VocabularyHead(8, 4)]
    with model_in_job(2, layers=layers, loss_fn=VocabularyLoss()) as model:
        clip = nn.ClipGradByGlobalNorm(0.01)
        adam = paddle.optimizer.Adam(0.1, parameters=model.parameters(), grad_clip=clip)
        optimizer, data = fleet.distributed_optimizer(adam), given(*batch())
        losses = [told(model.train_batch(data, optimizer)) for _ in range(2)]
        losses.append(told(model.eval_batch(data, compute_loss=True)))
        state = model._layers.full_state_dict()
        return losses, {name: told(value) for name, value in state.items()}


def of_a_topology_of_its_own() -> Any:
    """Shared layers with num_stages alone; the second stage does not use one that it has."""

    def shared(key: str, forward: Any = None) -> Any:
        return SharedLayerDesc(key, nn.Linear, forward, "weight", 6, 6)

    ignored = shared("first", lambda _, x: x)
    entries = [shared("both"), shared("first"), nn.functional.tanh]
    entries += [shared("both"), ignored, LayerDesc(nn.Linear, 6, 4)]
    with job(2):
        layers = PipelineLayer(entries, num_stages=2, loss_fn=nn.CrossEntropyLoss())
        model = fleet.distributed_model(layers)
        for _ in range(2):
            model.train_batch(given(*batch()), sgd(model))
        return {name: value.tolist() for name, value in layers.own_state().items()}


def of_replicas() -> Any:
    """A step made of its two halves: the gradients of the replicas are averaged once."""
    steps = 4 if ALONE else 2
    begin(dp=1 if ALONE else 2, micro_batches=steps)
    model = pipeline()
    optimizer = sgd(model)
    rows = slice(RANK * steps * ROWS, (RANK + 1) * steps * ROWS)
    for seed in range(2):
        model.forward_backward_pipeline([tensor[rows] for tensor in batch(seed=seed)])
        optimizer.step()
        optimizer.clear_grad()
    fleet.shutdown()
    return {name: value.tolist() for name, value in model.layers.state_dict().items()}


def of_plain_models() -> Any:
    """The wrappers of models that are no pipeline, along Fleet's other axes."""
    found = []
    for axis in ("sharding", "sep"):
        strategy = fleet.DistributedStrategy()
        # Fleet works the missing dp_degree out as 2, whatever this axis takes.
        strategy.hybrid_configs = {f"{axis}_degree": 1 if ALONE else 2}
        fleet.init(is_collective=True, strategy=strategy)
        paddle.seed(5 + RANK)
        plain = nn.Linear(6, 4)
        if ALONE or RANK == 0:
            plain.weight.set_value(paddle.ones([6, 4]))
        model = fleet.distributed_model(plain)
        optimizer = fleet.distributed_optimizer(
            paddle.optimizer.SGD(0.1, parameters=model.parameters())
        )
        inputs, labels = batch()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.clear_grad()
        found.append([type(model).__name__, plain.weight.numpy().tolist()])
        fleet.shutdown()
    return found


def everything() -> dict[str, Any]:
    """What each of the parts gives, by its name."""
    parts = [of_losses, of_iterators, of_a_vee, of_a_head]
    parts += [of_a_topology_of_its_own, of_replicas, of_plain_models]
    return {part.__name__: part() for part in parts}
