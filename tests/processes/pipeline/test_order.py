"""``order="ready"``: the bits of the fixed order on ranks, and what it does not go with."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import paddle
import pytest
from paddle import nn

from fleetpipe.config import PipelineConfig
from fleetpipe.dygraph.train.runtime import _EnvelopeBuilder, _require_no_order
from fleetpipe.engine import ready
from fleetpipe.errors import ConfigError, FleetPipeError
from fleetpipe.fleet.meta_parallel import LayerDesc, SharedLayerDesc
from fleetpipe.mesh.axes import Degrees
from tests.dygraph.models import MODELS, VOCABULARY, FeedForward, Tokens, logits
from tests.pipelines import CLASSES, FEATURES, adam, job, model_in_job, pipeline, sgd, train

MICRO_BATCHES = 6
TEXT = MODELS["gpt"].batch


class Restless(nn.Layer):
    """Takes another time in each forward and backward; computes nothing."""

    def forward(self, x: Any) -> Any:
        time.sleep(time.perf_counter_ns() % 5 / 3000)
        if not x.stop_gradient:
            x.register_hook(lambda _: time.sleep(time.perf_counter_ns() % 5 / 3000))
        return x


def layers(blocks: int = 6) -> list[Any]:
    """A tied embedding around restless blocks with dropout."""
    middle = [
        entry
        for _ in range(blocks)
        for entry in (LayerDesc(FeedForward), LayerDesc(nn.Dropout, 0.3), LayerDesc(Restless))
    ]
    shared = {"shared_weight_attr": "embedding_weight"}
    return [
        SharedLayerDesc("embed", Tokens, **shared),
        *middle,
        SharedLayerDesc("embed", Tokens, forward_func=logits, **shared),
    ]


#: Schedules with fleetpipe's own options and those of the model.
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("1F1B", {"memory_cap": 4}, {}),
    ("ZBH1", {"memory_cap": 4}, {}),
    ("1F1B", {}, {"num_virtual_pipeline_stages": 2, "recompute_interval": 1, "recompute_ctx": {}}),
    ("ZBV", {"sums": "tree"}, {"num_virtual_pipeline_stages": 2}),
    ("DualPipeV", {"memory_cap": 8}, {"num_virtual_pipeline_stages": 2}),
]


def cross_entropy(output: Any, label: Any) -> Any:
    return nn.functional.cross_entropy(output.reshape([-1, VOCABULARY]), label.reshape([-1]))


def train_both_ways(pp: int, folder: str) -> list[tuple[bool, int]]:
    """For each case, whether both orders end with the same bits, and what ran early."""
    ready.PATIENCE = ready.PATIENCE_OF_FORWARDS = 0.01
    results = []
    for schedule, configs, options in CASES:
        early = 0

        def count(model: Any) -> None:
            nonlocal early
            (walker,) = model._runtime.engines.training._walkers.values()
            early += getattr(walker, "early", 0)

        both = [
            train(
                layers(),
                pp,
                schedule,
                micro_batches=MICRO_BATCHES,
                steps=5,  # in the first, backwards are compared too
                data=TEXT,
                optimizer=adam,
                gradients=True,
                configs={**configs, **own},
                each_step=count,
                loss_fn=cross_entropy,
                **options,
            )
            for own in ({}, {"order": "ready", "trace": folder})
        ]
        results.append((both[0] == both[1], early))
    return results


def test_bits_are_those_of_the_fixed_order(
    on_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    ranks = on_ranks(train_both_ways, 2, 2, str(tmp_path / "trace"))
    assert [[same for same, _ in results] for results in ranks] == [[True] * len(CASES)] * 2
    assert all(sum(early) > 0 for early in zip(*([e for _, e in results] for results in ranks)))
    document = json.loads((tmp_path / "trace" / "trace.json").read_text())
    marks = [
        event["args"].get("early", 0) for event in document["traceEvents"] if event["ph"] == "X"
    ]
    assert sum(marks) > 0


#: Options that need the order of the schedule, with words of their errors.
REFUSED = {("rng", "fleet"): "from one generator"}
if paddle.version.major != "2":  # whose process groups cannot send on a CPU
    REFUSED["transport", "process_group"] = "{'transport': 'sockets'} too; or leave order out"


def refused_on_ranks() -> list[str]:
    """The errors of options that need the order of the schedule."""
    messages = []
    for option, word in REFUSED:
        with job(2, order="ready", **{option: word}) as running:
            with pytest.raises(ConfigError) as caught:
                pipeline()
            running.group().all_gather(0)  # nobody leaves before the others have come
        messages.append(str(caught.value))
    return messages


def test_options_that_need_the_order_of_the_schedule_are_refused(
    on_ranks: Callable[..., list[Any]],
) -> None:
    for messages in on_ranks(refused_on_ranks, 2):
        for words, message in zip(REFUSED.values(), messages, strict=True):
            assert words in message


@pytest.mark.parametrize(
    ("degrees", "exchanges", "layer", "reason"),
    [
        (Degrees(pp=2, mp=2), False, nn.Linear(2, 2), "ranks along mp compute each action"),
        (Degrees(pp=2, sep=2, cp=2), False, nn.Linear(2, 2), "ranks along sep, cp compute"),
        (Degrees(pp=2, dp=2), True, nn.Linear(2, 2), "experts that they share"),
        (Degrees(pp=2, dp=2), False, nn.SyncBatchNorm(2), "experts that they share, or SyncBatch"),
    ],
)
def test_ranks_that_compute_an_action_together_are_refused(
    degrees: Degrees, exchanges: bool, layer: Any, reason: str
) -> None:
    running: Any = SimpleNamespace(degrees=degrees, copies=lambda: SimpleNamespace(ranks=2))
    model: Any = nn.LayerList([layer])
    with pytest.raises(ConfigError, match=reason):
        _require_no_order(PipelineConfig(order="ready"), running, model, exchanges)


measured: list[float] = []


class Measuring(nn.Layer):
    """Measures gradients, and keeps them where the way says; counts its calls in any case."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(FEATURES, FEATURES), nn.BatchNorm1D(FEATURES)
        self.way, self.calls, self.most = way, 0, 0.0
        self.register_buffer("peak", paddle.zeros([]))

    def forward(self, x: Any) -> Any:
        self.calls += 1
        y = self.norm(self.linear(x))
        if not y.stop_gradient:
            y.register_hook(self.note)
        return y

    def note(self, grad: Any) -> None:
        if self.way == "attribute":
            self.most = max(self.most, float(grad.abs().max()))
        elif self.way == "buffer":
            self.peak.set_value(grad.abs().max())
        elif self.way == "list":
            measured.append(float(grad.abs().max()))


def measure(way: str, configs: dict[str, Any], options: dict[str, Any]) -> str:
    """The error of a batch whose layer measures gradients; "" if it trains."""
    measured.clear()
    entries = [LayerDesc(Measuring, way), LayerDesc(nn.Linear, FEATURES, CLASSES)]
    with model_in_job(2, 4, layers=entries, order="ready", **configs, **options) as model:
        inputs = paddle.arange(8 * FEATURES, dtype="float32").reshape([8, FEATURES])
        batch = [inputs.cos(), paddle.zeros([8, 1], "int64")]
        try:
            model.train_batch(batch, sgd(model))
        except FleetPipeError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("way", "configs", "options", "words"),
    [
        ("attribute", {}, {}, "0.most"),
        ("buffer", {}, {}, "0.peak"),
        ("list", {}, {}, "beside the layers[0]"),
        ("attribute", {"allow": ["state:0.most"]}, {}, ""),
        ("none", {}, {}, ""),
        ("none", {}, {"recompute_interval": 1, "recompute_ctx": {}}, ""),
    ],
)
def test_what_a_backward_leaves_for_forwards_is_refused(
    on_ranks: Callable[..., list[Any]],
    way: str,
    configs: dict[str, Any],
    options: dict[str, Any],
    words: str,
) -> None:
    for message in on_ranks(measure, 2, way, configs, options):
        assert (f"'allow': ['state:{words}']" in message) if words else not message


def disagree() -> str:
    own = {"order": "ready"} if paddle.distributed.get_rank() else {}
    with pytest.raises(ConfigError) as caught, job(2, **own):
        pass
    return str(caught.value)


def test_ranks_that_disagree_are_refused(on_ranks: Callable[..., list[Any]]) -> None:
    for message in on_ranks(disagree, 2):
        assert "order = 'fixed'" in message
        assert "order = 'ready'" in message


def test_an_unknown_order_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match="order is 'fixed' or 'ready'") as caught,
        job(2, order="redy"),
    ):
        pass
    assert "fleetpipe_configs = {'order': 'ready'}" in str(caught.value)


def test_one_process_keeps_its_order_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    fixed = train(micro_batches=MICRO_BATCHES, gradients=True)
    assert train(micro_batches=MICRO_BATCHES, gradients=True, configs={"order": "ready"}) == fixed
    assert "order='ready' changes nothing" in caplog.text


@pytest.mark.parametrize("tied", [False, True])
def test_stages_of_a_rank_that_share_a_weight_keep_their_order(tied: bool) -> None:
    listed = layers() if tied else layers()[1:-1]
    with model_in_job(2, 4, "ZBV", layers=listed, num_virtual_pipeline_stages=2) as model:
        runtime = model._runtime
        made = _EnvelopeBuilder.__new__(_EnvelopeBuilder)
        made._rank, made._schedule, made._layers = 0, runtime.schedule, runtime.layers
        assert made._stages_share_tensors() == tied
