"""Ranks that part: what one rank does alone ends both at once, in one error with both lines."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import paddle

import fleetpipe
from fleetpipe import fleet
from fleetpipe.errors import FleetPipeError
from tests import byhand, jobs
from tests.pipelines import batch, pipeline, sgd

RANK = int(os.environ.get("PADDLE_TRAINER_ID", "0"))
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
        jobs.begin(2, timeout=20)
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


def test_ranks_that_part_end_at_once_with_both_calls(
    on_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    for row, *ends in zip(PARTED, *on_ranks(part, 2, str(tmp_path))):
        for text, seconds in ends:
            assert text, row
            assert seconds < byhand.PROMPT / 2, row
        assert all(words in "".join(text for text, _ in ends) for words in row[2]), (row, ends)
