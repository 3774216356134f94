"""What only real ranks show: who gets the loss, who needs data, state and tied weights of all."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from fleetpipe import fleet
from fleetpipe.contrib.view.trace_replay import steps_of
from fleetpipe.contrib.view.traced_ops import read_trace
from fleetpipe.fleet import lifecycle
from fleetpipe.fleet.meta_parallel import LayerDesc, SharedLayerDesc
from fleetpipe.schedules import build
from tests.dygraph import models
from tests.dygraph.models import MODELS
from tests.engine.test_observer import actions
from tests.fixtures import Call
from tests.launching import ROOT, Finished, JobFailed
from tests.pipelines import batch, bits, job, pipeline, sgd

PARITY = """
from tests.pipelines import adam, batch, job, pipeline

with job(2):
    model = pipeline()
    if model.is_pipeline_last_stage():
        model.layers.state_dict()["4.weight"].register_hook(lambda grad: grad * 2)
    optimizer = adam(model)
    for seed in range(3):
        model.train_batch(batch(seed=seed), optimizer)
    model.eval_batch([part[:7] for part in batch()], compute_loss=True)
    model.predict_batch(batch()[0])
"""


def test_the_parity_command_on_two_ranks(launch: Callable[..., Finished], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PARITY)
    launched = ROOT / "fleetpipe" / "launch" / "rank_main.py"
    done = launch(launched, 2, args=["parity", str(script)], check=False)
    assert done.returncode == 1
    for log in done.logs:
        assert "compared 3 steps and 2 evaluations" in log
        assert "first difference: step 0: gradient of 4.weight" in log


def fail_on_the_last_stage() -> None:
    with job(2, timeout=100):
        model = pipeline([LayerDesc(nn.Linear, 6, 8), LayerDesc(nn.Linear, 9, 4)])
        model.train_batch(batch(), sgd(model))


def test_an_exception_on_one_rank_ends_the_other(on_ranks: Callable[..., Any]) -> None:
    with pytest.raises(JobFailed) as failed:
        on_ranks(fail_on_the_last_stage, 2, timeout=150)
    ended = failed.value.job
    assert isinstance(ended, Finished)
    assert ended.returncode != 0
    assert "layer 1 (Linear) cannot take what layer 0 returned" in ended.logs[1]
    assert "PeerFailed" in ended.logs[0]
    assert "rank 1" in ended.logs[0]
    assert ended.seconds < 90  # far below the limit of a wait


def begin_after_slow_groups() -> tuple[float | None, float]:
    """Begins a job in which rank 1 takes 1 s for its groups; when these were made, and it began."""
    moments = []
    make = lifecycle._make_groups

    def make_slowly(*arguments: Any) -> Any:
        made = make(*arguments)
        time.sleep(1)
        moments.append(time.time())
        return made

    if os.environ["PADDLE_TRAINER_ID"] == "1":
        lifecycle._make_groups = make_slowly
    with job(2):
        return (moments or [None])[0], time.time()


def test_nobody_leaves_the_start_while_others_make_groups(on_ranks: Callable[..., Any]) -> None:
    (_, began), (made, _) = on_ranks(begin_after_slow_groups, 2)
    assert began >= made


TRACED = """
    import sys
    from tests.pipelines import batch, mlp_and_sgd

    with mlp_and_sgd(2, micro_batches=4, trace=sys.argv[1]) as (model, optimizer):
        for step in range(3):
            model.train_batch(batch(seed=step), optimizer)
"""


def test_the_trace_of_two_ranks(launch: Callable[..., Finished], tmp_path: Path) -> None:
    done = launch(TRACED, 2, args=[str(tmp_path)])
    document = json.loads((tmp_path / "trace.json").read_text())
    rows = build("1F1B", ranks=2, micro_batches=4).actions
    assert actions(document, 2) == [[str(action) for action in row] * 3 for row in rows]
    told = r"bubble rate 0\.\d+ measured after the first step, 0\.\d+ predicted"
    assert re.search(told, done.logs[0])
    assert "bubble rate" not in done.logs[1]
    steps = steps_of(read_trace(tmp_path / "trace.json"), one_thread=True)
    assert [len(step.operations) for step in steps] == [2 * (8 + 8)] * 3


class Run:
    """A model in the current job, and what it is trained with."""

    def __init__(self) -> None:
        # The middle stage calls the embedding again, the last one has a class of its own.
        head = SharedLayerDesc("embed", models.Head, None, "embedding_weight")
        self.model = pipeline([*models.layers()[:-1], head], loss_fn=models.loss)
        self.rate = paddle.optimizer.lr.NaturalExpDecay(0.01, 0.1)
        clip = paddle.nn.ClipGradByGlobalNorm(0.5)
        parameters = self.model.parameters()
        adamw = paddle.optimizer.AdamW(self.rate, parameters=parameters, grad_clip=clip)
        self.optimizer = fleet.distributed_optimizer(adamw)

    def train(self, steps: range) -> list[float]:
        """The losses of these steps."""
        batches = (MODELS["gpt"].batch(4, step) for step in steps)
        return [self.model.train_batch(data, self.optimizer, self.rate).item() for data in batches]


def trained(folder: Path, schedule: str) -> dict[str, Any]:
    """Trains, saves, and goes on: with the same objects and with others."""
    rank = max(0, paddle.distributed.get_rank())
    paddle.seed(rank)
    # Paddle finds the state of an optimizer by names that it counts: each begins at 0.
    with job(3, 4, schedule), paddle.utils.unique_name.guard():
        run = Run()
        own = run.model.layers.own_state()
        result = {
            "start": bits(own),
            "flags": {name: getattr(p, "is_firstly_shared", True) for name, p in own.items()},
        }
        run.model.forward_backward_pipeline(MODELS["gpt"].batch(4, 0))
        result["gradients"] = {n: p.grad.numpy() for n, p in own.items() if p.grad is not None}
        run.optimizer.clear_grad()
        result["losses"] = run.train(range(3))
        run.model.layers.save_state_dict(folder / "layers")
        name = str(folder / f"optimizer{rank}")
        paddle.save(run.optimizer.state_dict(), name)
        result["further"] = run.train(range(3, 6))

    # The same steps again, by objects that know only what was saved.
    with job(3, 4, schedule), paddle.utils.unique_name.guard():
        run = Run()
        layers = run.model.layers
        layers.set_state_dir(folder / "layers")
        run.optimizer.set_state_dict(paddle.load(name))
        result["straight"] = run.train(range(3, 6))
        result["own"] = bits(layers.own_state())
        result["keys"] = list(run.model.state_dict())
        result["full"] = bits(layers.full_state_dict())
        result["comm"] = {key: comm["ranks"] for key, comm in layers.shared_comm.items()}
        for tensor in layers.own_state().values():
            tensor.set_value(paddle.full_like(tensor, rank))
        layers._synchronize_shared_weights()
        own = layers.own_state()
        result["synchronized"] = {name: float(tensor.max()) for name, tensor in own.items()}
        return result


WEIGHT = "shared_layers.embed.table.weight"


@pytest.mark.once_for("ZBV")
@pytest.mark.parametrize("schedule", ["1F1B", "ZBV"])
def test_three_copies_stay_equal_under_adamw(on_ranks: Call, tmp_path: Path, schedule: str) -> None:
    ranks = on_ranks(trained, 3, tmp_path, schedule)
    files = sorted(path.name for path in (tmp_path / "layers").glob("layer*"))
    alone = trained(tmp_path, schedule)

    holders = [rank for rank in ranks if WEIGHT in rank["own"]]
    assert len(holders) == {"1F1B": 3, "ZBV": 2}[schedule]
    for what in ("start", "own"):
        assert len({rank[what][WEIGHT] for rank in holders}) == 1
    assert ranks[0]["start"][WEIGHT] != ranks[0]["own"][WEIGHT]
    assert [rank["flags"][WEIGHT] for rank in holders] == [True, False, False][: len(holders)]
    assert {name: rank["start"][name] for rank in ranks for name in rank["start"]} == alone["start"]
    for rank in ranks:
        assert list(rank["full"]) == list(alone["full"])
        assert rank["full"] == ranks[0]["full"]
        for name, gradient in rank["gradients"].items():
            expected = alone["gradients"][name]
            error = np.linalg.norm(gradient - expected)
            assert error <= 1e-6 * np.linalg.norm(expected), name
        assert rank["losses"] == ranks[0]["losses"]
        # What was saved and read goes on as if there had been nothing in between.
        assert rank["straight"] == rank["further"] == ranks[0]["straight"]
    for number, rank in enumerate(ranks):
        # Each rank has filled its weights with its number: the first one's counts where shared.
        for name, value in rank["synchronized"].items():
            assert value == (0 if name.startswith("shared_layers.") else number), name
    for losses in ("straight", "losses"):
        np.testing.assert_allclose(ranks[0][losses], alone[losses], rtol=1e-5)
    if schedule == "1F1B":
        assert all(rank["comm"] == {"embed": [0, 1, 2]} for rank in ranks)
        assert ranks[0]["keys"][:2] == [f"_layers.shared_layers.embed.{n}" for n in NAMES]
        assert ranks[2]["keys"][0] == "_layers.shared_layers.embed.table"
        written = [f"layer_{i:02d}" for i in (0, 1, 2, 5, 6, 7, 8)]
    else:
        chunks = {0: 0, 1: 0, 2: 0, 5: 1, 6: 1, 7: 1, 8: 1}
        written = [f"layer_{i:02d}-virtual_pp_stage_{c:02d}" for i, c in chunks.items()]
    assert files == [f"{stem}-tensor_00-model_states.pdparams" for stem in written]


NAMES = ("scale", "table.weight")
