"""A rank that does wrong things one after another; for 2 ranks.

Each part returns what it was refused with, and the losses of the job afterwards.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle
from paddle import nn

from fleetpipe import fleet
from fleetpipe.fleet.meta_parallel import (
    ColumnParallelLinear,
    LayerDesc,
    PipelineLayer,
    RowParallelLinear,
    SharedLayerDesc,
    VocabParallelEmbedding,
)
from tests.pipelines import CLASSES, FEATURES, batch, job, mlp_layers, pipeline, sgd
from tests.scalers import enabled_scaler, half_precision

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
