"""Mistakes of every rank, or of one alone: all ranks are told at once, and no job hangs."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe import fleet
from fleetpipe.errors import FleetPipeError
from fleetpipe.fleet.meta_parallel import (
    ColumnParallelLinear,
    LayerDesc,
    PipelineLayer,
    RowParallelLinear,
    SharedLayerDesc,
    VocabParallelEmbedding,
)
from tests import byhand, pipelines
from tests.pipelines import (
    CLASSES,
    FEATURES,
    batch,
    enabled_scaler,
    half_precision,
    job,
    mlp_layers,
    pipeline,
    sgd,
    train,
)

RANK = int(os.environ.get("PADDLE_TRAINER_ID", "0"))
#: Far above what a refusal takes. A rank that waits for the other one gets another error then.
TIMEOUT = 20.0

Found = dict[str, Any]


def one_after_another(folder: Path, cases: dict[str, Callable[[], Any]]) -> Found:
    """Runs the cases on rank 0 while rank 1 is elsewhere, then the other way round."""
    folder.mkdir(exist_ok=True)
    done = [folder / str(rank) for rank in range(2)]
    if RANK == 1:
        wait_for(done[0])
    found = refused(cases)
    done[RANK].touch()
    wait_for(done[1])
    return found


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < deadline, f"{file} does not come"
        time.sleep(0.01)


def refused(cases: dict[str, Callable[[], Any]]) -> Found:
    """Runs each case; returns the type and the text of each error."""
    found: Found = {}
    for name, case in cases.items():
        try:
            case()
        except Exception as error:
            found[name] = [type(error).__name__, str(error)]
        else:
            found[name] = ["nothing", ""]
    return found


def losses(model: Any, data: Any = None) -> list[bytes]:
    """Trains three steps."""
    optimizer = sgd(model)
    steps = [model.train_batch(data or batch(seed=seed), optimizer) for seed in range(3)]
    return [loss.numpy().tobytes() for loss in steps]


def shared(*sizes: int) -> Any:
    return SharedLayerDesc("k", nn.Linear, None, "weight", *sizes)


def in_a_pipeline(folder: Path) -> Found:
    """Each on both ranks, within one job that then goes on."""
    linear = LayerDesc(nn.Linear, FEATURES, CLASSES)
    inputs, labels = batch()
    with job(2, timeout=TIMEOUT):
        model, silent = pipeline(), pipeline(loss_fn=None)
        optimizer = sgd(model)

        def train(wrapped: Any = model, data: Any = None, **options: Any) -> Any:
            options.setdefault("optimizer", optimizer)
            return wrapped.train_batch(data or [inputs, labels], **options)

        def without_gradients() -> None:
            with paddle.no_grad():
                train()

        def scaled_without_loss() -> None:
            with half_precision():
                train(silent, optimizer=sgd(silent), scaler=enabled_scaler())

        found = one_after_another(
            folder / "pipeline",
            {
                "shared shapes": lambda: pipeline([shared(6, 6), nn.functional.relu, shared(6, 4)]),
                "too few layers": lambda: pipeline([linear]),
                "a bad cut": lambda: pipeline(seg_method=[0, 9]),
                "no stages": lambda: PipelineLayer(mlp_layers()),
                "other stages": lambda: PipelineLayer(mlp_layers(), num_stages=3),
                "no pipeline": lambda: fleet.distributed_model(nn.Linear(2, 2)),
                "other parameters": lambda: train(optimizer=sgd(nn.Linear(2, 2))),
                "a bare optimizer": lambda: train(
                    optimizer=paddle.optimizer.SGD(parameters=model.parameters())
                ),
                "no_grad": without_gradients,
                "a scaler without a loss": scaled_without_loss,
                "no such loss": lambda: train(loss_fn_idx=1),
                "too few rows": lambda: train(data=[inputs[:7], labels[:7]]),
                "no data": lambda: train(data=[None, None]),
                "no scheduler": lambda: train(lr_scheduler=0.1),
                "no scaler": lambda: train(scaler=1024),
                "a class": lambda: pipeline([nn.ReLU, linear]),
                "wrapped twice": lambda: fleet.distributed_model(model),
                "no folder": lambda: model.layers.set_state_dir(folder / "nowhere"),
            },
        )
        return {"refused": found, "losses": losses(model)}


def with_slices(folder: Path) -> Found:
    """Each on both members, within one job that then goes on."""
    with job(mp=2, timeout=TIMEOUT):

        def build(description: Any) -> Callable[[], Any]:
            return lambda: pipeline([nn.functional.relu, description])

        found = one_after_another(
            folder / "slices",
            {
                "heads": build(LayerDesc(ColumnParallelLinear, 6, 3 * 5, gather_output=True)),
                "the heads' outputs": build(LayerDesc(RowParallelLinear, 15, 6)),
                "vocabulary": build(LayerDesc(VocabParallelEmbedding, 11, 6)),
            },
        )
        model = pipeline(
            [
                LayerDesc(ColumnParallelLinear, FEATURES, 8, has_bias=True, gather_output=False),
                LayerDesc(RowParallelLinear, 8, CLASSES, input_is_parallel=True),
            ]
        )
        return {"refused": found, "losses": losses(model)}


def at_a_boundary() -> Found:
    """What only the second rank can see ends the job on both; another begins."""

    class Half(nn.Linear):
        def __init__(self, *sizes: int) -> None:
            super().__init__(*sizes)
            self.to(dtype="float64")

    with job(2, timeout=TIMEOUT):
        model = pipeline([LayerDesc(nn.Linear, FEATURES, 8), LayerDesc(Half, 8, CLASSES)])
        found = refused({"mixed dtypes": lambda: losses(model)})
    with job(2, timeout=TIMEOUT):
        return {"refused": found, "losses": losses(pipeline())}


def everything(folder: Path) -> dict[str, Found]:
    """All parts, by their names."""
    parts = (in_a_pipeline(folder), with_slices(folder), at_a_boundary())
    return dict(zip(("in_a_pipeline", "with_slices", "at_a_boundary"), parts))


PIPELINE = {
    "shared shapes": ("ConfigError", r"layers 0 and 2 of the list[\s\S]*\[6, 6\][\s\S]*\[6, 4\]"),
    "too few layers": ("PartitionError", "1 layers cannot fill 2 stages"),
    "a bad cut": ("PartitionError", "would end before it begins"),
    "no stages": ("ConfigError", "needs num_stages or topology"),
    "other stages": ("ConfigError", "num_stages=3, pp_degree of fleet.init=2"),
    "no pipeline": ("ConfigError", "pp_degree=2 needs a PipelineLayer"),
    "other parameters": ("ConfigError", "built on the wrong parameters"),
    "a bare optimizer": ("ConfigError", "fleet.distributed_optimizer"),
    "no_grad": ("ConfigError", "training needs gradients"),
    "a scaler without a loss": ("ConfigError", "no loss function"),
    "no such loss": ("ConfigError", "no loss function 1"),
    "too few rows": ("ConfigError", "4 x 2 = 8 rows"),
    "no data": ("ConfigError", "was given no (inputs|labels)"),
    "no scheduler": ("ConfigError", "lr_scheduler of train_batch is not an LRScheduler"),
    "no scaler": ("ConfigError", "scaler of train_batch is not a GradScaler"),
    "a class": ("ConfigError", r"LayerDesc\(ReLU, \.\.\)"),
    "wrapped twice": ("ConfigError", "wrapped already"),
    "no folder": ("CheckpointError", "no such folder"),
}
SLICES = {
    "heads": ("ConfigError", r"`out_features` \(=15\) must be divisible"),
    "the heads' outputs": ("ConfigError", r"`in_features` \(=15\) must be divisible"),
    "vocabulary": ("ConfigError", r"`num_embeddings` \(=11\) must be divisible"),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs the two ranks once, when the first test asks for what they return."""
    found: list[Any] = []

    def run(on_ranks: Callable[..., Any]) -> list[Any]:
        if not found:
            found.extend(on_ranks(everything, 2, tmp_path_factory.mktemp("refusals")))
        return found

    return run


@pytest.mark.parametrize(
    ("part", "expected"), [("in_a_pipeline", PIPELINE), ("with_slices", SLICES)]
)
def test_each_rank_refuses_before_it_waits_and_trains_afterwards(
    on_ranks: Callable[..., Any], ranks: Any, part: str, expected: dict[str, tuple[str, str]]
) -> None:
    both = [found[part] for found in ranks(on_ranks)]
    for found in both:
        assert found["refused"].keys() == expected.keys()
        for name, (kind, message) in expected.items():
            told, text = found["refused"][name]
            assert told == kind, (name, text)
            assert re.search(message, text), text
    assert both[0]["losses"] == both[1]["losses"]
    if part == "in_a_pipeline":
        assert both[0]["losses"] == train(steps=3).losses


def test_mixed_dtypes_end_the_batch_on_both_ranks(on_ranks: Callable[..., Any], ranks: Any) -> None:
    both = [found["at_a_boundary"] for found in ranks(on_ranks)]
    (kind, text), (own_kind, own_text) = (f["refused"]["mixed dtypes"] for f in both)
    assert own_kind == "BoundaryError"
    assert "layer 1 (Half) cannot take what layer 0 returned" in own_text
    assert "float32[2, 8], from layer 0 (Linear)" in own_text
    assert kind == "PeerFailed"
    assert "rank 1 raised: BoundaryError: layer 1 (Half) cannot take" in text
    assert both[0]["losses"] == both[1]["losses"] == train(steps=3).losses


A, B = batch(4, 0), batch(4, 1)


class Script:
    """A script on a pipeline of two ranks, whose lines are methods here."""

    def __init__(self, folder: str) -> None:
        self.model = pipeline()
        self.optimizer = sgd(self.model)
        self.manager = fleetpipe.CheckpointManager(folder)

    def trains(self, data: Any = A) -> None:
        self.model.train_batch(data, self.optimizer)

    def evaluates(self, data: Any = A) -> None:
        self.model.eval_batch(data, compute_loss=True)

    def collects(self) -> None:
        self.model.eval_batch(A)

    def predicts(self) -> None:
        self.model.predict_batch(A[0])

    def looks(self) -> None:
        self.model.predict_batch(A[0], broadcast=False)

    def gathers(self) -> None:
        self.model.layers.full_state_dict()

    def hashes(self) -> None:
        fleetpipe.model_hash(self.model)

    def saves(self) -> None:
        self.manager.save(1, model=self.model)

    def restores(self) -> None:
        self.manager.restore(model=self.model)

    def profiles(self) -> None:
        self.model.profile(A)

    def generates(self) -> None:
        fleetpipe.generate(self.model, [[1, 2]], 2)

    def clips(self) -> None:
        self.optimizer._grad_clip = paddle.nn.ClipGradByGlobalNorm(1.0)

    def catches(self) -> None:
        with suppress(FleetPipeError):
            self.trains([A[0][:3], A[1][:3]])

    def shortens(self) -> None:
        self.model.accumulate_steps = 2
        self.trains([A[0][:4], A[1][:4]])
        self.model.accumulate_steps = 4

    def slows(self) -> None:
        self.optimizer.set_lr(0.01)

    def exchanges(self) -> None:
        fleet.util.all_gather(RANK)

    def trains_others(self) -> None:
        self.trains(B)


TRAINS, EVALUATES = "trains a batch", "evaluates a batch"
#: What each call is in the error of ranks that part.
WORDS = {
    "evaluates": EVALUATES,
    "collects": EVALUATES,
    "predicts": "predicts",
    "looks": "predicts",
    "gathers": "gathers the state, by full_state_dict",
    "hashes": "is hashing the model",
    "saves": "is saving step 1",
    "restores": "is restoring",
    "profiles": "profiles a batch",
    "generates": "generates",
    "exchanges": "is exchanging values of the script's",
    "clips": "compares the optimizers",
}
#: What rank 0 does, what rank 1 does, and the error's words; then both train twice.
PARTED = [
    *((one, "", (words, TRAINS)) for one, words in WORDS.items()),
    *(("", one, (words, TRAINS)) for one, words in WORDS.items()),
    ("evaluates evaluates", "evaluates", (EVALUATES, TRAINS)),
    ("trains collects", "collects trains", (EVALUATES, TRAINS)),
    ("saves", "evaluates", ("is saving step 1", EVALUATES)),
    ("hashes", "saves", ("is hashing", "is saving")),
    ("predicts", "collects", ("predicts", EVALUATES)),
    ("gathers", "hashes", ("gathers the state", "is hashing")),
    ("restores", "saves", ("is restoring", "is saving")),
    ("trains", "", ("different rows",)),
    ("", "trains", ("different rows",)),
    ("trains_others", "trains", ("different rows",)),
    ("catches", "trains", ("different rows",)),
    ("shortens", "trains", ("different rows",)),
    ("slows", "", ("0.01 and 0.1", "learning rates")),
]


def part(folder: str) -> list[tuple[str, float]]:
    """Acts all rows out, each in a job of its own; the error of this rank, and when it came."""
    ends = []
    for number, lines in enumerate(PARTED):
        pipelines.begin(2, timeout=20)
        script, begin, text = Script(f"{folder}/{number}"), time.monotonic(), ""
        try:
            script.trains()
            script.saves()
            for line in lines[RANK].split():
                getattr(script, line)()
            script.trains()
            script.trains(B)
            fleet.shutdown()
        except FleetPipeError as error:
            text = str(error)
            with suppress(FleetPipeError):
                fleet.shutdown()
        ends.append((text, time.monotonic() - begin))
    return ends


def test_ranks_that_part_end_at_once(on_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    for row, *ends in zip(PARTED, *on_ranks(part, 2, str(tmp_path))):
        for text, seconds in ends:
            assert text, row
            assert seconds < byhand.PROMPT / 2, row
        assert all(words in "".join(text for text, _ in ends) for words in row[2]), (row, ends)
