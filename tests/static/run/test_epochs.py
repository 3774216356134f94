"""Static graph on real ranks: the end of an epoch, Paddle's own save and load, export."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from fleetpipe import fleet, static
from fleetpipe.errors import FleetPipeError
from fleetpipe.paddle_api.static import EOFException
from tests.fixtures import Call
from tests.static.networks import (
    FEATURES,
    ROWS,
    batches,
    executor_of,
    mlp,
    static_mode,
    strategy_of,
)

pytestmark = pytest.mark.once

FEEDS = batches(3)


class Rows(paddle.io.Dataset):
    """The rows of so many micro-batches."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def __len__(self) -> int:
        return self.count * ROWS

    def __getitem__(self, index: int) -> Any:
        feed = FEEDS[index // 8]
        return feed["x"][index % 8], feed["y"][index % 8]


def raised(call: Call, *arguments: Any, **named: Any) -> str:
    with pytest.raises(FleetPipeError) as caught:
        call(*arguments, **named)
    return str(caught.value)


def life(folder: Path) -> dict[str, Any]:
    """Trains until the end of the data, saves, loads and exports; returns the losses by phase."""
    rank, alone = (
        int(os.environ.get("PADDLE_TRAINER_ID", "0")),
        "PADDLE_TRAINERS_NUM" not in os.environ,
    )
    found: dict[str, Any] = {}
    with static_mode():
        paddle.seed(7)
        fleet.init(is_collective=True)
        loss, logits = mlp(2, norm=True)()
        main = paddle.static.default_main_program()
        whole = main.clone()
        exe = executor_of(loss, strategy_of(timeout=40), paddle.optimizer.Adam(0.05))
        x, y = (next(value for value in main.list_vars() if value.name == name) for name in "xy")
        # 9 micro-batches on rank 0 and 11 on rank 1: two groups of four, and a rest is dropped.
        rows = Rows(9 if rank == "0" else 11)

        def step(feed: Any = None) -> Any:
            value = exe.run(main, feed=feed, fetch_list=[loss])[0]
            return None if value is None else value.tolist()

        def until_the_end(feed: Any = None) -> Iterator[Any]:
            while True:
                try:
                    yield step(feed)
                except EOFException:
                    return

        loader = static.DataLoader.from_generator([x, y])
        loader.set_sample_list_generator(
            lambda: ([rows[ROWS * i + row] for row in range(ROWS)] for i in range(rows.count))
        )
        found["epochs"] = []
        for _ in range(2):
            loader.start()
            found["epochs"].append([*until_the_end()])
            loader.reset()
        stock = paddle.io.DataLoader(
            rows, feed_list=[x, y], batch_size=ROWS, return_list=False, places=[paddle.CPUPlace()]
        )
        found["stock"] = [*until_the_end(iter(stock))]
        paddle.static.save(main, str(folder / "half"))
        found["after saving"] = [step(FEEDS[2]), step(FEEDS[2])]
        paddle.static.load(main, str(folder / "half"), exe)
        found["after loading"] = [step(FEEDS[2]), step(FEEDS[2])]
        if not alone:
            paddle.static.load(main, str(folder / "alone" / "half"), exe)
            found["after loading what one process saved"] = [step(FEEDS[2]), step(FEEDS[2])]
            export = paddle.static.save_inference_model
            found["stock export"] = raised(export, str(folder / "no"), [x], [logits], exe)
            found["clone"] = raised(exe.run, whole, feed=FEEDS[0], fetch_list=[])
        static.save_inference_model(folder / "net", [x], [logits], exe)
        return found


def exported(prefix: Path) -> np.ndarray:
    """What an exported network makes of ones."""
    with static_mode():
        exe = paddle.static.Executor(paddle.CPUPlace())
        program, _, targets = paddle.static.load_inference_model(str(prefix), exe)
        fed = {"x": np.ones((3, FEATURES), "float32")}
        return np.asarray(exe.run(program, feed=fed, fetch_list=targets)[0])


def test_two_ranks_end_an_epoch_save_load_and_export_as_one_process_does(
    on_ranks: Call, tmp_path: Path
) -> None:
    (tmp_path / "alone").mkdir()
    (alone,) = on_ranks(life, None, tmp_path / "alone")
    first, last = on_ranks(life, 2, tmp_path)
    assert alone["after saving"] == alone["after loading"]
    assert len({*map(tuple, alone["epochs"]), tuple(alone["stock"])}) == 3
    for name, losses in alone.items():
        assert last[name] == losses, name
    nothing = [None, None]
    assert (first["epochs"], first["stock"]) == ([nothing, nothing], nothing)
    assert last["after loading what one process saved"] == alone["after saving"]
    assert "fleetpipe.static.save_inference_model" in first["stock export"]
    for refusal in (first["clone"], last["clone"]):
        assert re.match(r"the program needs 'batch_norm1d_\d\.b_0', which another rank", refusal)
    assert first["clone"] != last["clone"]
    np.testing.assert_array_equal(exported(tmp_path / "net"), exported(tmp_path / "alone" / "net"))
    assert not list(tmp_path.glob("*.pd*.[0-9]*")), "drafts that were left"
