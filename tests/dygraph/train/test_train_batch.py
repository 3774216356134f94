"""``train_batch`` with all its parameters, and what Fleet's users read of the wrapper."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import paddle
import pytest
from paddle import nn

from fleetpipe import fleet
from fleetpipe.errors import BoundaryError, ConfigError, StateError, UsageError
from fleetpipe.fleet.meta_parallel import (
    DualPipeVParallel,
    LayerDesc,
    NoPipelineParallel,
    PipelineLayer,
    PipelineParallel,
    PipelineParallelWithInterleave,
    PipelineParallelWithInterleaveFthenB,
    VPPFhenBInBalancedMemory,
    register_global_pipeline_parallel_hook,
)
from fleetpipe.fleet.meta_parallel import PipelineParallelMicroStepLocations as Locations
from fleetpipe.fleet.utils import recompute
from tests import pipelines
from tests.pipelines import (
    ROWS,
    batch,
    bits,
    job,
    mlp_and_sgd,
    mlp_layers,
    model_in_job,
    pipeline,
    sgd,
    switch,
    train,
)


def cross_entropy(output: Any, label: Any) -> Any:
    return nn.functional.cross_entropy(output, label)


def spread(output: Any, label: Any) -> Any:
    return (output * output).mean().astype("float64").reshape([1]) * 3


def by_hand(chosen: int, micro_batches: int, delayed: bool = False) -> tuple[Any, dict[str, bytes]]:
    """Losses of each function and micro-batch, and the parameters after one step."""
    with job(1, micro_batches):
        model = pipeline(loss_fn=cross_entropy).layers.single_model()
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    inputs, labels = batch(micro_batches)
    losses: list[list[Any]] = [[], []]
    for k in range(micro_batches):
        rows = slice(k * ROWS, (k + 1) * ROWS)
        output = model(inputs[rows])
        for number, function in enumerate((cross_entropy, spread)):
            loss = function(output, labels[rows])
            losses[number].append(loss.detach() if delayed else loss.detach() / micro_batches)
            if number == chosen:
                (loss if delayed else loss / micro_batches).backward()
    if delayed:
        for parameter in model.parameters():
            parameter.grad = parameter.grad / micro_batches
    optimizer.step()
    return losses, bits(model.state_dict())


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("chosen", [0, 1])
def test_all_losses_are_returned_and_the_chosen_one_trains(ranks: int, chosen: int) -> None:
    expected, parameters = by_hand(chosen, 3)
    with model_in_job(ranks, 3, loss_fn=[cross_entropy, spread]) as model:
        losses = model.train_batch(batch(3), sgd(model), loss_fn_idx=chosen)
        assert [loss.shape for loss in losses] == [[], [1]]
        for loss, parts in zip(losses, expected):
            assert loss.numpy().tobytes() == (parts[0] + parts[1] + parts[2]).numpy().tobytes()
        assert bits(model.layers.state_dict()) == parameters


@pytest.mark.parametrize("delayed", [False, True])
def test_the_losses_of_micro_batches_are_shares_of_the_batch_loss(delayed: bool) -> None:
    expected, parameters = by_hand(0, 3, delayed)
    with job(2, 3):
        switch(delay_scale_loss=delayed)
        model = pipeline(loss_fn=[cross_entropy, spread])
        first, second = model.train_batch(batch(3), sgd(model), return_micro_batch_loss=True)
        assert (first.shape, second.shape) == ([3], [3])
        for found, parts in zip((first, second), expected):
            assert found.numpy().tolist() == [part.numpy().item() for part in parts]
        assert [loss.numpy().tolist() for loss in model.total_loss] == [
            first.numpy().tolist(),
            second.numpy().tolist(),
        ]
        assert bits(model.layers.state_dict()) == parameters
    with job(2, 3):
        switch(delay_scale_loss=delayed)
        model = pipeline(loss_fn=cross_entropy)
        total = model.train_batch(batch(3), sgd(model))
        if delayed:
            assert float(total) == float((first[0] + first[1] + first[2]) / 3)
        else:
            assert float(total) == float(first[0] + first[1] + first[2])


def test_delayed_scaling_divides_sparse_gradients() -> None:
    states = []
    for sparse in (False, True):
        with job(2):
            switch(delay_scale_loss=True)
            embedding = LayerDesc(nn.Embedding, 10, 4, sparse=sparse)
            model = pipeline([embedding, LayerDesc(nn.Linear, 4, 3)])
            data = paddle.arange(8).reshape([8, 1]) % 3
            model.train_batch([data[:, 0], data], sgd(model))
            states.append([p.numpy() for p in model.layers.full_state_dict().values()])
    assert max(abs(one - other).max() for one, other in zip(*states)) < 1e-7


def test_delayed_scaling_leaves_gradients_undivided_until_the_step() -> None:
    gradients = []
    for delayed in (False, True):
        with job(2, 4):
            switch(delay_scale_loss=delayed)
            model = pipeline()
            model.forward_backward_pipeline(batch(4))
            gradients.append([p.grad.numpy() for p in model.parameters()])
    # A quotient by a power of two is exact.
    assert all((a * 4 == b).all() for a, b in zip(*gradients))


@pytest.mark.parametrize("index", [1, -1, 7])
def test_a_loss_function_that_is_not_there_is_refused_at_once(index: int) -> None:
    with model_in_job(2) as model, pytest.raises(ConfigError, match="no loss function"):
        model.train_batch(batch(), sgd(model), loss_fn_idx=index)


def test_a_loss_that_trains_nothing_is_refused() -> None:
    refused = pytest.raises(BoundaryError, match="does not depend on any parameter")
    with model_in_job(2, loss_fn=lambda output, label: output.detach().mean()) as model, refused:
        model.train_batch(batch(), sgd(model))


def mean_of_labelled(output: Any, label: Any) -> Any:
    rows = (label >= 0).flatten()
    if not bool(rows.any()):
        return paddle.zeros([])
    return nn.functional.cross_entropy(output[rows], label[rows])


@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1"])
@pytest.mark.parametrize("masked", [[0, 3], [0, 1, 2]])
def test_a_constant_loss_of_micro_batches_adds_no_gradient(
    masked: list[int], schedule: str
) -> None:
    inputs, labels = batch(4)
    for number in masked:
        labels[2 * number : 2 * number + 2] = -1
    with model_in_job(2, 4, schedule, loss_fn=mean_of_labelled) as model:
        plain = model.layers.single_model()
        model.layers.copy_to(plain)
        loss = model.forward_backward_pipeline([inputs, labels])
        expected = 0.0
        for rows in (slice(k, k + 2) for k in range(0, 8, 2)):
            share = mean_of_labelled(plain(inputs[rows]), labels[rows]) / 4
            expected += float(share)
            if not share.stop_gradient:
                share.backward()
        gradients = [p.grad.numpy() for p in plain.parameters()]
        assert float(loss) == pytest.approx(expected, rel=1e-6)
        assert all((p.grad.numpy() == g).all() for p, g in zip(model.parameters(), gradients))
        optimizer = sgd(model)
        optimizer.clear_grad()
        # Once a loss has had a gradient, a batch may have none at all.
        before = bits(model.layers.state_dict())
        model.train_batch([inputs, paddle.full_like(labels, -1)], optimizer)
        assert bits(model.layers.state_dict()) == before


def _no_hook(*arguments: Any) -> None:
    """A hook that never runs."""


@pytest.mark.parametrize("kind", ["pre", "post"])
@pytest.mark.parametrize("of", ["pipe", "wrapper"])
def test_forward_hooks_of_the_whole_are_refused(of: str, kind: str) -> None:
    with model_in_job(2) as model:
        whole = model if of == "wrapper" else model.layers
        register = getattr(whole, f"register_forward_{kind}_hook")
        refused = pytest.raises(ConfigError, match="no forward hook of")
        if of == "wrapper":
            with refused:
                register(_no_hook)
        else:
            handle = register(_no_hook)
            with refused:
                model.train_batch(batch(), sgd(model))
            with pytest.raises(ConfigError, match="got: _no_hook"):
                model.predict_batch(batch()[0])
            handle.remove()
        model.train_batch(batch(), sgd(model))


class Own:
    """An optimizer that is none of Paddle's, and says nothing of its rate."""

    def __init__(self, rate: float, parameters: list[Any]) -> None:
        self.sgd = paddle.optimizer.SGD(rate, parameters=parameters)

    def step(self) -> None:
        self.sgd.step()

    def clear_grad(self) -> None:
        self.sgd.clear_grad()


@pytest.mark.parametrize("kind", [paddle.optimizer.SGD, Own])
def test_a_bare_optimizer_trains_where_there_is_no_pipeline(kind: Any) -> None:
    with model_in_job(1) as model:
        before = bits(model.layers.state_dict())
        model.train_batch(batch(), kind(0.1, parameters=model.parameters()))
        assert bits(model.layers.state_dict()) != before


@pytest.mark.parametrize(
    ("ranks", "chunks", "micro_batches", "schedule", "kind"),
    [
        (1, None, 4, "1F1B", NoPipelineParallel),
        (2, None, 4, "1F1B", PipelineParallel),
        (2, 2, 4, "1F1B", PipelineParallelWithInterleave),
        (2, 2, 3, "1F1B", PipelineParallelWithInterleaveFthenB),
        (2, 2, 1, "1F1B", PipelineParallelWithInterleave),
        (2, None, 4, "ZBV", PipelineParallelWithInterleave),
        (2, None, 4, "DualPipeV", DualPipeVParallel),
        # By a switch.
        (2, 2, 3, "best_unbalanced_scheduler", VPPFhenBInBalancedMemory),
        (2, None, 4, "use_dualpipev", DualPipeVParallel),
    ],
)
def test_the_type_is_the_one_that_fleet_would_choose(
    ranks: int, chunks: int | None, micro_batches: int, schedule: str, kind: type
) -> None:
    by_switch = "_" in schedule
    with job(ranks, micro_batches, "1F1B" if by_switch else schedule):
        switch(**({schedule: True} if by_switch else {}))
        model = pipeline(num_virtual_pipeline_stages=chunks)
        assert type(model) is kind
        if kind is DualPipeVParallel:
            assert model.schedule.name == "DualPipeV"
            ends = model.is_pipeline_first_stage(), model.is_pipeline_last_stage()
            assert ends == (True, True)
        if kind is VPPFhenBInBalancedMemory:
            assert model.bubble_pipeline_parallel_hook_capacity == 2
        assert isinstance(model, PipelineParallel)
        assert isinstance(model, paddle.nn.Layer)
        if isinstance(model, PipelineParallelWithInterleave):
            assert model.schedule.name in model._get_scheduler_name()


def test_switches_that_tune_a_gpu_change_nothing() -> None:
    names = ["dp_comm_overlap", "sharding_comm_overlap", "overlap_p2p_comm"]
    names += ["clear_every_step_cache", "enable_dynamic_shape", "enable_offload_queue"]
    names += ["sync_param", "sync_moment", "release_gradients"]
    names += ["forward_backward_overlap_scheduler"]
    with job(2):
        switch(use_batch_p2p_comm=False, **dict.fromkeys(names, True))
        model = pipeline()
        optimizer = sgd(model)
        for seed in range(2):
            model.train_batch(batch(seed=seed), optimizer)
        assert bits(model.layers.state_dict()) == train().state
        assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_that_orders_its_own_overlap_is_refused() -> None:
    class Overlapped(PipelineLayer):
        def overlapped_forward_backward(self) -> None: ...

    with job(2):
        switch(forward_backward_overlap_scheduler=True)
        model = Overlapped(mlp_layers(), num_stages=2, loss_fn=cross_entropy)
        with pytest.raises(ConfigError, match="DualPipeV"):
            fleet.distributed_model(model)


def test_timers_are_logged_each_step(caplog: pytest.LogCaptureFixture) -> None:
    with job(2):
        strategy = fleet.fleet._user_defined_strategy
        strategy.hybrid_configs["pp_configs"].enable_timer = True
        model = pipeline()
        optimizer = sgd(model)
        caplog.clear()
        for _ in range(2):
            model.train_batch(batch(), optimizer)
        lines = [line for line in caplog.messages if line.startswith("time (ms)")]
        assert len(lines) == 2
        for name in (
            "forward_step",
            "backward_step",
            "send_forward",
            "recv_backward",
            "allreduce_shared_weight_gradients",
            "allreduce_gradients",
            "broadcast_final_loss",
        ):
            assert f"{name}: " in lines[0]
            assert model.timers(name).elapsed() == 0  # each line is of one step
        model.timers("mine").start()
        with pytest.raises(StateError, match="started already"):
            model.timers("mine").start()
        model.timers("mine").stop()
        assert model.timers("mine").elapsed() > 0
        assert model.timers("mine").elapsed() == 0


def test_the_attributes_of_the_wrapper() -> None:
    with job(3, 4):
        seen: list[int] = []
        model = pipeline(
            loss_fn=lambda output, label: (
                seen.append(model.micro_batch_id),
                cross_entropy(output, label),
            )[1]
        )
        assert (model.stage_id, model.num_stages, model.global_rank) == (0, 3, 0)
        assert (model.micro_batch_size, model.accumulate_steps) == (ROWS, 4)
        assert (model.num_model_chunks, model.model_chunks) == (1, None)
        assert (model.timers, model.total_loss, model.micro_batch_id) == (None, None, 0)
        assert model._hcg is fleet.get_hybrid_communicate_group()
        assert model.pp_group is model._hcg.get_pipe_parallel_group()
        assert isinstance(model._layers, PipelineLayer)
        assert model._layers is model.layers
        assert all(name.startswith("_layers.") for name in model.state_dict())
        assert len(model.state_dict()) == len(model.layers.state_dict())
        model.train_batch(batch(), sgd(model))
        assert (seen, model.micro_batch_id) == ([0, 1, 2, 3], 4)
        inputs, _ = batch()
        assert (model(inputs).numpy() == model.layers(inputs).numpy()).all()


def test_the_chunk_that_first_and_last_are_asked_of() -> None:
    with model_in_job(2, 4, num_virtual_pipeline_stages=2) as model:
        assert (model.num_model_chunks, len(model.model_chunks)) == (2, 4)
        assert (model.is_pipeline_first_stage(), model.is_pipeline_last_stage()) == (True, True)
        model.set_virtual_pipeline_rank(0)
        assert (model.is_pipeline_first_stage(), model.is_pipeline_last_stage()) == (True, False)
        assert model.is_pipeline_last_stage(ignore_virtual=True)
        model.set_virtual_pipeline_rank(1)
        assert (model.is_pipeline_first_stage(), model.is_pipeline_last_stage()) == (False, True)


def test_the_number_of_micro_batches_may_be_set() -> None:
    results = []
    for begun in (4, 2):
        with mlp_and_sgd(2, begun) as (model, optimizer):
            model.micro_batch_size, model.accumulate_steps = 4, 2
            loss = model.train_batch(batch(4), optimizer)
            assert model.schedule.micro_batches == 2
            results.append((float(loss), bits(model.layers.state_dict())))
    assert results[0] == results[1]


def test_shapes_may_change_between_micro_batches_and_steps() -> None:
    def uneven(_: int, step: int) -> list[Any]:
        inputs, labels = batch(6, step)
        sizes = [1, 3, 2, 6][:: 1 - 2 * step]
        return [inputs.split(sizes), labels.split(sizes)]

    assert train(pp=1, data=uneven) == train(pp=2, data=uneven) == train(pp=3, data=uneven)


def test_nan_is_not_sent_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, labels = batch()
    inputs[2 * ROWS, 0] = float("nan")
    with model_in_job(2) as model:
        model.train_batch([inputs, labels], sgd(model))
    monkeypatch.setenv("FLAGS_pp_check_naninf", "1")
    with model_in_job(2) as model:
        with pytest.raises(ValueError, match="the output of stage 0 holds NaN") as caught:
            model.train_batch([inputs, labels], sgd(model))
        assert "rank 0, stage 0, micro-batch 2" in str(caught.value)
        model.train_batch(batch(), sgd(model))
    refused = pytest.raises(ValueError, match="the gradient of the input of stage 1 holds NaN")
    with model_in_job(2, loss_fn=lambda output, label: (output * 0).sqrt().sum()) as model, refused:
        model.train_batch(batch(), sgd(model))


def test_the_schedule_in_fleets_spelling() -> None:
    with model_in_job(2, 3) as model:
        assert model.forward_backward_pipeline(None, static_scheduler=True) == (
            "f0;f1;b0;f2;b1;b2;"
        )
    with model_in_job(2, 2, num_virtual_pipeline_stages=2) as model:
        assert model.get_static_scheduler() == (
            "f0_vp0;f1_vp0;f0_vp1;f1_vp1;b0_vp1;b1_vp1;b0_vp0;b1_vp0;"
        )


@pytest.mark.parametrize(
    ("option", "dtype"), [("use_pure_fp16", "float16"), ("use_pure_bf16", "bfloat16")]
)
def test_pure_half_precision_is_asked_of_paddle(
    monkeypatch: pytest.MonkeyPatch, option: str, dtype: str
) -> None:
    asked: list[tuple[str, str]] = []
    original = paddle.amp.decorate

    def note(models: Any, level: str, dtype: str) -> Any:
        asked.append((level, dtype))
        return original(models=models, level=level, dtype=dtype)

    monkeypatch.setattr(paddle.amp, "decorate", note)
    with job(2):
        strategy = fleet.fleet._user_defined_strategy
        strategy.amp = True
        model = pipeline()
        assert asked == []
        strategy.amp_configs = {option: True}
        model = pipeline()
        assert asked == [("O2", dtype)]
        # Which on CPU changes nothing.
        assert {str(p.dtype) for p in model.parameters()} == {"paddle.float32"}
        assert float(model.train_batch(batch(), sgd(model))) > 0


def test_a_plain_layer_in_one_process_comes_back_as_it_is() -> None:
    with job(1):
        model = nn.Linear(3, 2)
        assert fleet.distributed_model(model) is model
        optimizer = sgd(model)
        before = model.weight.numpy()
        model(paddle.ones([4, 3])).mean().backward()
        optimizer.step()
        optimizer.clear_grad()
        assert (before != model.weight.numpy()).any()


def with_the_data_of_its_ends() -> dict[str, Any]:
    """Does all that a wrapper can; each rank is given what it needs of the data."""
    launched = "PADDLE_TRAINER_ID" in os.environ
    rank = int(os.environ.get("PADDLE_TRAINER_ID", "0"))
    paddle.seed(rank)

    def given(inputs: Any, labels: Any) -> Any:
        return [[inputs, None], None, [None, labels]][rank] if launched else [inputs, labels]

    def held(tensors: list[Any]) -> list[Any]:
        return [(t.shape, t.dtype, t.stop_gradient, t.numpy().tobytes()) for t in tensors]

    with model_in_job(3, micro_batches=4, loss_fn=[cross_entropy, spread]) as model:
        optimizer = sgd(model)
        result: dict[str, Any] = {
            "first evaluation": held(model.eval_batch(given(*batch(5)), compute_loss=True)),
            "losses": held(model.train_batch(given(*batch()), optimizer, loss_fn_idx=1)),
        }
        seen: list[int] = []
        model.register_forward_pipeline_parallel_hook(1, seen.append)
        register_global_pipeline_parallel_hook(
            Locations.BACKWARD_END, lambda **values: seen.append(values["step_id"])
        )
        shares = model.train_batch(given(*batch(seed=1)), optimizer, return_micro_batch_loss=True)
        result["shares"] = held(shares)
        result["last evaluation"] = held(model.eval_batch(given(*batch(7)), compute_loss=True))
        refused = pytest.raises(UsageError, match=r"rank \d of the(.|\n)*model\.train_batch")
        with refused if launched else nullcontext():
            model(batch(3)[0])
        inputs = batch(3)[0] if rank == 0 else None
        result["prediction"] = held([model.predict_batch(inputs)])
        own = model.predict_batch(inputs, broadcast=False)
        result["own"] = None if own is None else held([own])
        result["outputs"] = held(model.eval_batch(given(*batch())))
        result["seen"] = seen
        result["state"] = bits(model.layers.full_state_dict())
        single = model.layers.single_model()
        model.layers.copy_to(single)
        model.layers.load_from(single)
        result["single"] = bits(single.state_dict())
        result["own state"] = sorted(model.layers.state_dict())
        result["held"] = model.peak_held
        result["scheduler"] = model.get_static_scheduler()
        for hooks in model.callbacks.hooks.values():
            hooks.clear()
        return result


def test_three_ranks_do_what_one_process_does(on_ranks: Callable[..., Any]) -> None:
    ranks = on_ranks(with_the_data_of_its_ends, 3)
    alone = with_the_data_of_its_ends()
    same = ["first evaluation", "losses", "shares", "last evaluation", "prediction"]
    same += ["state", "single"]
    for rank in ranks:
        for what in same:
            assert rank[what] == alone[what], what
        # The numbered hook once, and the end of each backward.
        assert sorted(rank["seen"]) == [0, 1, 1, 2, 3]
    assert [len(alone[what]) for what in same[:5]] == [2, 2, 2, 2, 1]
    for what, shapes in (("losses", [[], [1]]), ("shares", [[4], [4]])):
        facts = [loss[:3] for loss in alone[what]]
        dtypes = paddle.float32, paddle.float64
        assert facts == [(shape, dtype, True) for shape, dtype in zip(shapes, dtypes)]
    assert [rank["own"] for rank in ranks] == [None, None, alone["prediction"]]
    assert [rank["outputs"] for rank in ranks] == [[], [], alone["outputs"]]
    assert sorted(name for rank in ranks for name in rank["own state"]) == alone["own state"]
    assert [rank["held"] for rank in ranks] == [{0: 3}, {1: 2}, {2: 1}]
    assert [rank["scheduler"] for rank in ranks] == [
        "f0;f1;f2;b0;f3;b1;b2;b3;",
        "f0;f1;b0;f2;b1;f3;b2;b3;",
        "f0;b0;f1;b1;f2;b2;f3;b3;",
    ]


def without_a_pipeline() -> list[Any]:
    """Trains replicas of a model of one stage, of a plain layer, and of one that recomputes."""
    rank = paddle.distributed.get_rank()
    fleet.init(is_collective=True, strategy=pipelines.strategy(2))
    model = PipelineLayer(mlp_layers(), num_stages=1, loss_fn=nn.CrossEntropyLoss())
    model = fleet.distributed_model(model)
    assert type(model) is NoPipelineParallel
    optimizer = sgd(model)
    inputs, labels = (part[rank * 2 * ROWS :][: 2 * ROWS] for part in batch(4))
    losses = [float(model.train_batch([inputs, labels], optimizer)) for _ in range(3)]
    losses.append(float(model.eval_batch([inputs, labels], compute_loss=True)))
    outputs = model.eval_batch([inputs, None])

    plain = nn.Linear(6, 4)
    wrapped = fleet.distributed_model(plain)
    assert isinstance(wrapped, paddle.DataParallel)
    optimizer = sgd(wrapped)
    cross_entropy(wrapped(inputs), labels).backward()
    optimizer.step()
    optimizer.clear_grad()
    with wrapped.no_sync():
        cross_entropy(wrapped(inputs), labels).backward()
    optimizer.step()
    fleet.shutdown()
    apart = gradients_of_recomputing_replicas()
    return [losses, len(outputs), plain.weight.numpy().tobytes(), apart]


class Recomputed(nn.Layer):
    """Layers of which each is run again in the backward of a training."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))

    def forward(self, value: Any, scale: float) -> Any:
        """Runs them."""
        for layer in self.layers:
            value = (recompute(layer, value) if self.training else layer(value)).tanh() * scale
        return value


def gradients_of_recomputing_replicas() -> float:
    """How far the gradients of two replicas of a plain model are from those of one."""
    rank = paddle.distributed.get_rank()
    paddle.seed(0)
    plain = Recomputed()
    inputs, labels = batch(4)
    plain.eval()
    cross_entropy(plain(inputs, 2.0), labels).backward()
    wanted = [parameter.grad.clone() for parameter in plain.parameters()]
    plain.train()
    plain.clear_gradients()
    fleet.init(is_collective=True, strategy=pipelines.strategy(2))
    wrapped = fleet.distributed_model(plain)
    rows = slice(rank * 2 * ROWS, (rank + 1) * 2 * ROWS)
    cross_entropy(wrapped(inputs[rows], 2.0), labels[rows]).backward()
    fleet.shutdown()
    pairs = zip(plain.parameters(), wanted)
    return max(float((parameter.grad - grad).abs().max()) for parameter, grad in pairs)


def test_two_replicas_without_a_pipeline(on_ranks: Callable[..., Any]) -> None:
    first, other = on_ranks(without_a_pipeline, 2)
    assert max(first.pop(), other.pop()) < 1e-7
    with mlp_and_sgd(1, 4) as (model, optimizer):
        losses = [float(model.train_batch(batch(4), optimizer)) for _ in range(3)]
        losses.append(float(model.eval_batch(batch(4), compute_loss=True)))
    assert first == other
    assert first[:2] == [pytest.approx(losses, rel=1e-6), 2]
