"""Replicas of a pipeline: equal parameters, the gradients of the whole batch, groups by order."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.launching import ROOT, Finished

REPLICAS = f"""
import json, os, sys
sys.path.insert(0, {str(ROOT)!r})
import numpy as np
import paddle
from fleetpipe import fleet, parity
from tests import jobs
from tests.pipelines import CLASSES, FEATURES, ROWS, bits, mlp_layers, pipeline, sgd

rank = int(os.environ["PADDLE_TRAINER_ID"])
scale = sys.argv[2]
paddle.seed(100 + rank)
strategy = jobs.strategy(2, dp=2, pp=2)
strategy.gradient_scale_configs = {{"scale_strategy": scale}}
fleet.init(is_collective=True, strategy=strategy)
hcg = fleet.get_hybrid_communicate_group()
replica = hcg.get_data_parallel_rank()

# Built layers keep the values that each rank's own seed gave them.
layers = [paddle.nn.Linear(FEATURES, 8), paddle.nn.functional.tanh, paddle.nn.Linear(8, CLASSES)]
model = pipeline(layers)
start = model.layers.full_state_dict()
optimizer = sgd(model, 0.1)
losses = []
for step in range(20):
    numbers = np.random.default_rng(step)
    inputs = numbers.standard_normal((4 * ROWS, FEATURES)).astype("float32")
    labels = numbers.integers(0, CLASSES, (4 * ROWS, 1))
    mine = slice(replica * 2 * ROWS, (replica + 1) * 2 * ROWS)
    batch = [paddle.to_tensor(inputs[mine]), paddle.to_tensor(labels[mine])]
    losses.append(model.train_batch(batch, optimizer))
end = model.layers.full_state_dict()

single = model.layers.single_model()
single.set_state_dict(start)
plain = paddle.optimizer.SGD(0.1, parameters=single.parameters())
criterion = paddle.nn.CrossEntropyLoss()
whole = []
for step in range(20):
    numbers = np.random.default_rng(step)
    inputs = paddle.to_tensor(numbers.standard_normal((4 * ROWS, FEATURES)).astype("float32"))
    labels = paddle.to_tensor(numbers.integers(0, CLASSES, (4 * ROWS, 1)))
    loss = criterion(single(inputs), labels)
    (loss * (2 if scale == "sum" else 1)).backward()
    plain.step()
    plain.clear_grad()
    whole.append(float(loss))
expected = single.state_dict()
gaps = {{
    name: float((end[name] - expected[name]).abs().max() / expected[name].abs().max())
    for name in expected
}}
session = parity.begin(model, fleet.distributed_optimizer(
    paddle.optimizer.SGD(0.1, parameters=model.parameters())))
session.step(batch)
with open(os.path.join(sys.argv[1], f"rank{{rank}}.json"), "w") as file:
    json.dump({{
        "losses": [float(loss) for loss in losses],
        "loss bits": [loss.numpy().tobytes().hex() for loss in losses],
        "whole": whole,
        "gaps": gaps,
        "state": {{name: value.hex() for name, value in bits(end).items()}},
        "moved": any(bits(start)[name] != bits(end)[name] for name in start),
        "parity": [session.report.passed, session.report.tolerance, session.report.verdict()],
    }}, file)
fleet.shutdown()
"""


def replicas(launch: Callable[..., Finished], folder: Path, scale: str) -> list[dict[str, object]]:
    launch(REPLICAS, 4, args=[str(folder), scale])
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(4)]


def test_replicas_train_as_one_device_on_the_whole_batch(
    launch: Callable[..., Finished], tmp_path: Path
) -> None:
    ranks = replicas(launch, tmp_path, "avg")
    for rank in ranks:
        assert rank["state"] == ranks[0]["state"]
        assert rank["loss bits"] == ranks[0]["loss bits"]
        assert max(rank["gaps"].values()) < 1e-6
        assert np.allclose(rank["losses"], rank["whole"], rtol=1e-6, atol=0)
        assert rank["moved"]
        passed, tolerance, verdict = rank["parity"]
        assert passed, verdict
        assert tolerance == 0.0
        assert "bit-exact" in verdict


def test_the_sum_of_the_replicas_gradients_can_be_asked_for(
    launch: Callable[..., Finished], tmp_path: Path
) -> None:
    for rank in replicas(launch, tmp_path, "sum"):
        assert max(rank["gaps"].values()) < 1e-6
        assert rank["parity"][0], rank["parity"][2]


GROUPS = f"""
import json, os, sys
sys.path.insert(0, {str(ROOT)!r})
from fleetpipe import fleet
from fleetpipe.io import DistributedBatchSampler
from tests import jobs

found = {{}}
for name, order in (("default", ()), ("pipeline first", ("pp", "dp"))):
    jobs.begin(dp=-1, pp=2, order=order)
    hcg = fleet.get_hybrid_communicate_group()
    seen = [list(batch) for batch in DistributedBatchSampler(range(16), 2)]
    found[name] = {{
        "data": hcg.topology().get_comm_list("data"),
        "pipe": hcg.topology().get_comm_list("pipe"),
        "replica": hcg.get_data_parallel_rank(),
        "stage": hcg.get_stage_id(),
        "own": hcg.get_data_parallel_group().ranks,
        "samples": seen,
    }}
    fleet.shutdown()
with open(os.path.join(sys.argv[1], f"rank{{os.environ['PADDLE_TRAINER_ID']}}.json"), "w") as file:
    json.dump(found, file)
"""


def test_eight_ranks_in_both_orders(launch: Callable[..., Finished], tmp_path: Path) -> None:
    launch(GROUPS, 8, args=[str(tmp_path)], timeout=240)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(8)]
    first = [rank["pipeline first"] for rank in ranks]
    assert first[0]["data"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert sorted(first[0]["pipe"]) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    default = [rank["default"] for rank in ranks]
    assert default[0]["data"] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert sorted(default[0]["pipe"]) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    for layout in (first, default):
        by_replica: dict[int, list[list[int]]] = {}
        for rank, found in enumerate(layout):
            assert rank in found["own"]
            # Both stages of a pipeline see the same samples, other replicas see others.
            assert by_replica.setdefault(found["replica"], found["samples"]) == found["samples"]
        samples = [index for seen in by_replica.values() for part in seen for index in part]
        assert sorted(samples) == list(range(16))
