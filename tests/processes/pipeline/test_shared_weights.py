"""Tied weights on real ranks: three copies that stay equal, and checkpoints of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.launching import ROOT, Finished

TRAIN = f"""
import json, os, sys
sys.path.insert(0, {str(ROOT)!r})
import paddle
from fleetpipe import fleet
from fleetpipe.fleet.meta_parallel import SharedLayerDesc
from tests.dygraph import tied
from tests.dygraph.models import MODELS
from tests.pipelines import bits, job, pipeline

folder, schedule = sys.argv[1:]
rank = int(os.environ.get("PADDLE_TRAINER_ID", "0"))
paddle.seed(rank)

def wrapped():
    # The middle stage calls the embedding again, the last one has a class of its own.
    layers = [*tied.layers()[:-1], SharedLayerDesc("embed", tied.Head, None, "embedding_weight")]
    model = pipeline(layers, loss_fn=tied.loss)
    rate = paddle.optimizer.lr.NaturalExpDecay(0.01, 0.1)
    clip = paddle.nn.ClipGradByGlobalNorm(0.5)
    adamw = paddle.optimizer.AdamW(rate, parameters=model.parameters(), grad_clip=clip)
    return model, fleet.distributed_optimizer(adamw), rate

def run(steps):
    return [
        model.train_batch(MODELS["gpt"].batch(4, s), optimizer, rate).numpy().tobytes().hex()
        for s in steps
    ]

def told(state):
    return {{name: value.hex() for name, value in bits(state).items()}}

# Paddle finds the state of an optimizer by names that it counts: each begins at 0.
with job(3, 4, schedule), paddle.utils.unique_name.guard():
    model, optimizer, rate = wrapped()
    start = told(model.layers.own_state())
    flags = {{
        name: getattr(p, "is_firstly_shared", True) for name, p in model.layers.own_state().items()
    }}
    model.forward_backward_pipeline(MODELS["gpt"].batch(4, 0))
    gradients = {{
        name: p.grad.numpy().tolist()
        for name, p in model.layers.own_state().items() if p.grad is not None
    }}
    optimizer.clear_grad()
    losses = run(range(3))
    model.layers.save_state_dict(os.path.join(folder, "layers"))
    name = os.path.join(folder, f"optimizer{{rank}}")
    paddle.save(optimizer.state_dict(), name)
    further = run(range(3, 6))

# The same steps again, by objects that know only what was saved.
with job(3, 4, schedule), paddle.utils.unique_name.guard():
    model, optimizer, rate = wrapped()
    model.layers.set_state_dir(os.path.join(folder, "layers"))
    optimizer.set_state_dict(paddle.load(name))
    straight = run(range(3, 6))
    result = {{
        "start": start, "flags": flags, "gradients": gradients, "losses": losses,
        "further": further, "straight": straight, "own": told(model.layers.own_state()),
        "keys": list(model.state_dict()), "full": told(model.layers.full_state_dict()),
        "comm": {{key: comm["ranks"] for key, comm in model.layers.shared_comm.items()}},
    }}
    for tensor in model.layers.own_state().values():
        tensor.set_value(paddle.full_like(tensor, rank))
    model.layers._synchronize_shared_weights()
    result["synchronized"] = {{n: float(t.max()) for n, t in model.layers.own_state().items()}}
    with open(os.path.join(folder, f"rank{{rank}}.json"), "w") as file:
        json.dump(result, file)
"""
WEIGHT = "shared_layers.embed.table.weight"


@pytest.mark.parametrize("schedule", ["1F1B", "ZBV"])
def test_three_copies_stay_equal_under_adamw(
    launch: Callable[..., Finished], tmp_path: Path, schedule: str
) -> None:
    launch(TRAIN, 3, args=[str(tmp_path), schedule])
    ranks = [json.loads((tmp_path / f"rank{r}.json").read_text()) for r in range(3)]
    files = sorted(path.name for path in (tmp_path / "layers").glob("layer*"))
    launch(TRAIN, None, args=[str(tmp_path), schedule])
    alone = json.loads((tmp_path / "rank0.json").read_text())

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
            expected = np.array(alone["gradients"][name])
            error = np.linalg.norm(np.array(gradient) - expected)
            assert error <= 1e-6 * np.linalg.norm(expected), name
        assert rank["losses"] == ranks[0]["losses"]
        # What was saved and read goes on as if there had been nothing in between.
        assert rank["straight"] == rank["further"] == ranks[0]["straight"]
    for number, rank in enumerate(ranks):
        # Each rank has filled its weights with its number: the first one's counts where shared.
        for name, value in rank["synchronized"].items():
            assert value == (0 if name.startswith("shared_layers.") else number), name
    close(ranks[0]["straight"] + ranks[0]["losses"], alone["straight"] + alone["losses"])
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


def close(found: list[str], expected: list[str]) -> None:
    """Losses but for rounding."""
    one, other = (
        [float(np.frombuffer(bytes.fromhex(x), np.float32)[0]) for x in losses]
        for losses in (found, expected)
    )
    np.testing.assert_allclose(one, other, rtol=1e-5)
