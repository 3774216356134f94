"""Static graph on real ranks: the end of an epoch, Paddle's own save and load, export."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import paddle
import pytest

from tests.fixtures import Launch
from tests.launching import ROOT
from tests.static.networks import FEATURES, static_mode

pytestmark = pytest.mark.once

LIFE = f"""
import json, os, sys
sys.path.insert(0, {str(ROOT)!r})
import paddle
from fleetpipe import fleet, static
from fleetpipe.errors import FleetPipeError
from tests.static.networks import ROWS, batches, executor_of, mlp, strategy_of

rank, alone = int(os.environ.get("PADDLE_TRAINER_ID", "0")), "PADDLE_TRAINERS_NUM" not in os.environ
paddle.enable_static()
paddle.seed(7)
fleet.init(is_collective=True)
loss, logits = mlp(2, norm=True)()
whole = paddle.static.default_main_program().clone()
strategy = strategy_of(timeout=40)
fleet.distributed_optimizer(paddle.optimizer.Adam(0.05), strategy).minimize(loss)
main = paddle.static.default_main_program()
x, y = (next(value for value in main.list_vars() if value.name == name) for name in "xy")
exe = executor_of()
feeds = batches(3)
told = {{}}

# 9 micro-batches on rank 0 and 11 on rank 1: two groups of four each, and a rest that is dropped.
count = 9 if rank == 0 else 11

class Rows(paddle.io.Dataset):
    def __len__(self):
        return count * ROWS

    def __getitem__(self, index):
        feed = feeds[index // 8]
        return feed["x"][index % 8], feed["y"][index % 8]

def micro_batches():
    rows = Rows()
    for index in range(count):
        yield [rows[index * ROWS + row] for row in range(ROWS)]

def until_the_end(**feed):
    found = []
    try:
        while True:
            value = exe.run(main, fetch_list=[loss], **feed)[0]
            found.append(None if value is None else value.tolist())
    except paddle.base.core.EOFException:
        return found

loader = static.DataLoader.from_generator([x, y])
loader.set_sample_list_generator(micro_batches)
told["epochs"] = []
for _ in range(2):
    loader.start()
    told["epochs"].append(until_the_end())
    loader.reset()
stock = paddle.io.DataLoader(
    Rows(), feed_list=[x, y], batch_size=ROWS, return_list=False, places=[paddle.CPUPlace()]
)
told["stock"] = until_the_end(feed=iter(stock))

def step():
    value = exe.run(main, feed=feeds[2], fetch_list=[loss])[0]
    return None if value is None else value.tolist()

folder = sys.argv[1]
paddle.static.save(main, os.path.join(folder, "half"))
told["after saving"] = [step(), step()]
paddle.static.load(main, os.path.join(folder, "half"), exe)
told["after loading"] = [step(), step()]
if not alone:
    paddle.static.load(main, os.path.join(folder, "alone", "half"), exe)
    told["after loading what one process saved"] = [step(), step()]
    try:
        paddle.static.save_inference_model(os.path.join(folder, "no"), [x], [logits], exe)
    except FleetPipeError as error:
        told["stock export"] = str(error)
    try:
        exe.run(whole, feed=feeds[0], fetch_list=[])
    except FleetPipeError as error:
        told["clone"] = str(error)
static.save_inference_model(os.path.join(folder, "net"), [x], [logits], exe)
with open(os.path.join(folder, f"rank{{rank}}.json"), "w") as file:
    json.dump(told, file)
fleet.shutdown()
"""


def exported(prefix: Path) -> np.ndarray:
    """What an exported network makes of ones."""
    with static_mode():
        exe = paddle.static.Executor(paddle.CPUPlace())
        program, _, targets = paddle.static.load_inference_model(str(prefix), exe)
        fed = {"x": np.ones((3, FEATURES), "float32")}
        return np.asarray(exe.run(program, feed=fed, fetch_list=targets)[0])


def test_two_ranks_end_an_epoch_save_load_and_export_as_one_process_does(
    launch: Launch, tmp_path: Path
) -> None:
    (tmp_path / "alone").mkdir()
    launch(LIFE, None, args=[str(tmp_path / "alone")])
    launch(LIFE, 2, args=[str(tmp_path)])
    alone = json.loads((tmp_path / "alone" / "rank0.json").read_text())
    first, last = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert alone["after saving"] == alone["after loading"]
    assert len({*map(tuple, alone["epochs"]), tuple(alone["stock"])}) == 3
    for name, found in alone.items():
        assert last[name] == found, name
    nothing = [None, None]
    assert (first["epochs"], first["stock"]) == ([nothing, nothing], nothing)
    assert last["after loading what one process saved"] == alone["after saving"]
    assert "fleetpipe.static.save_inference_model" in first["stock export"]
    for told in (first["clone"], last["clone"]):
        assert re.match(r"the program needs 'batch_norm1d_\d\.b_0', which another rank", told)
    assert first["clone"] != last["clone"]
    np.testing.assert_array_equal(exported(tmp_path / "net"), exported(tmp_path / "alone" / "net"))
    assert not list(tmp_path.glob("*.pd*.[0-9]*")), "drafts that were left"
