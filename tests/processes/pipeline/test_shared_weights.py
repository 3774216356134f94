"""Tied weights on real ranks: three copies that stay equal, and checkpoints of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from fleetpipe import fleet
from fleetpipe.fleet.meta_parallel import SharedLayerDesc
from tests.dygraph import tied
from tests.dygraph.models import MODELS
from tests.fixtures import Call
from tests.pipelines import bits, job, pipeline


class Run:
    """A model in the current job, and what it is trained with."""

    def __init__(self) -> None:
        # The middle stage calls the embedding again, the last one has a class of its own.
        head = SharedLayerDesc("embed", tied.Head, None, "embedding_weight")
        self.model = pipeline([*tied.layers()[:-1], head], loss_fn=tied.loss)
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
