"""A strike: in which step, before which operation, and only where the rank comes to it."""

from __future__ import annotations

import os
import signal

import pytest

from fleetpipe.cli import main
from fleetpipe.contrib.chaos.strike import VARIABLE, Strike
from fleetpipe.errors import ConfigError
from tests.jobs import begun
from tests.pipelines import batch, job, mlp_and_sgd, pipeline
from tests.static.networks import batches, executor_of, mlp, static_mode, strategy_of


@pytest.mark.parametrize("at", ["B0.2", "SF0>1.1", "FREE0.0", "STEP"])
def test_a_rank_is_struck_once_in_its_step_before_the_operation(
    monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    struck = []
    monkeypatch.setenv(VARIABLE, str(Strike(signal.SIGKILL, 0, at, 3)))
    with mlp_and_sgd(pp=2, micro_batches=4) as (model, optimizer):
        where = model._runtime.engines.training.where
        monkeypatch.setattr(os, "kill", lambda *killed: struck.append((*killed, where())))
        for step in range(5):
            model.eval_batch(batch(), compute_loss=True)
            model.train_batch(batch(), optimizer)
            assert len(struck) == (step >= 2)
    process, number, place = struck[0]
    assert (process, number) == (os.getpid(), signal.SIGKILL)
    assert place.startswith(f"rank 0, operation {at}")


def test_a_program_is_struck_as_a_model_is(monkeypatch: pytest.MonkeyPatch) -> None:
    struck = []
    monkeypatch.setenv(VARIABLE, str(Strike(signal.SIGKILL, 0, "B0.2", 2)))
    monkeypatch.setattr(os, "kill", lambda *killed: struck.append(killed))
    with static_mode(), begun(strategy_of()):
        exe = executor_of(mlp(2)()[0], strategy_of())
        for feed in batches(3):
            exe.run(feed=feed)
    assert struck == [(os.getpid(), signal.SIGKILL)]


def test_an_operation_that_the_rank_never_comes_to_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, str(Strike(signal.SIGKILL, 0, "B0.7", 1)))
    with job(pp=2, micro_batches=4), pytest.raises(ConfigError, match=r"never comes to 'B0\.7'"):
        pipeline()
    # Another rank's strike is none of this one's business.
    monkeypatch.setenv(VARIABLE, str(Strike(signal.SIGKILL, 1, "B0.7", 1)))
    with job(pp=2, micro_batches=4):
        pipeline()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--kill", "rank=1"], "invalid: 'rank=1'; give rank=1,at=B1.3"),
        (["--kill", "rank=1,at=B1.3", "--stop", "rank=1,at=B1.3"], "not allowed with"),
        (["--every", "3"], "one of the arguments --kill --stop is required"),
        (["--kill", "rank=1,at=B1.3", "--every", "0"], "invalid number: '0'; give 1, 2, 3, .."),
    ],
)
def test_what_the_command_does_not_understand_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chaos", *words, __file__]) == 2
    assert said in capsys.readouterr().err
