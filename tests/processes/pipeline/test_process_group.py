"""Tensors over Paddle's own groups: on real ranks, by Gloo, as they go over NCCL between GPUs."""

from __future__ import annotations

import os
import re
import signal
import time

import paddle
import pytest

from fleetpipe.job.job import current_job
from fleetpipe.schedules import names
from fleetpipe.transport import ProcessGroupTransport
from tests.contrib.slices import sliced
from tests.dygraph.models import MODELS
from tests.fixtures import Call
from tests.launching import Finished, JobFailed
from tests.pipelines import Trained, momentum, pipeline, sgd, train
from tests.pipelines import batch as rows
from tests.pipelines import job as begun

pytestmark = pytest.mark.once


def trained(ranks: int, schedules: list[str], transport: str | None) -> dict[str, Trained]:
    """What training under each schedule ends with."""
    results = {}
    for schedule in schedules:
        case = sliced.MODEL if schedule == "Seq1F1B" else MODELS["mlp"]
        results[schedule] = train(
            case.layers(),
            ranks,
            schedule,
            micro_batches=4,
            steps=1,
            data=case.batch,
            optimizer=momentum,
            loss_fn=case.loss,
            gradients=True,
            configs={"transport": transport},
            each_step=lambda _: require_transport(transport),
        )
    return results


def require_transport(name: str | None) -> None:
    """Fails where tensors go another way than was asked for."""
    job = current_job()
    assert job is not None
    for transport in job.connect().values():
        assert isinstance(transport, ProcessGroupTransport) == (name is not None)


@pytest.mark.parametrize(("ranks", "schedules"), [(2, ["1F1B", "ZBV"]), (4, names())])
def test_every_schedule_has_the_bits_of_one_process(
    on_ranks: Call, ranks: int, schedules: list[str]
) -> None:
    alone = trained(ranks, schedules, None)
    of_ranks = on_ranks(trained, ranks, ranks, schedules, "process_group", timeout=120)
    for schedule, one in alone.items():
        for result in of_ranks:
            assert result[schedule].losses == one.losses, schedule
            assert result[schedule].state == one.state, schedule
        gradients = {k: v for result in of_ranks for k, v in result[schedule].gradients.items()}
        assert gradients == one.gradients, schedule


def end_in_the_midst(how: str) -> None:
    """Rank 1 dies, or stops, when it has all that rank 0 sends of its second step."""
    micro_batches, losses = 4, 0

    def loss(logits: paddle.Tensor, labels: paddle.Tensor) -> paddle.Tensor:
        nonlocal losses
        losses += 1
        if losses == 2 * micro_batches:
            if how == "sleep":
                time.sleep(100)
            os.kill(os.getpid(), signal.SIGKILL)
        return paddle.nn.functional.cross_entropy(logits, labels)

    with begun(2, micro_batches=micro_batches, timeout=3):
        model = pipeline(loss_fn=loss)
        optimizer = sgd(model)
        require_transport("process_group")
        for _ in range(2):
            model.train_batch(rows(micro_batches), optimizer)


@pytest.mark.parametrize(
    ("how", "message"),
    [("die", "PeerFailed: rank 1 died"), ("sleep", "rank 0 waited 3 s for a message of rank 1")],
)
def test_what_a_rank_waits_for_is_named(on_ranks: Call, how: str, message: str) -> None:
    env = {"FLEETPIPE_TRANSPORT": "process_group"}
    with pytest.raises(JobFailed) as failed:
        on_ranks(end_in_the_midst, 2, how, env=env, timeout=60)
    ended = failed.value.job
    assert isinstance(ended, Finished)
    assert message in ended.logs[0]
    assert re.search(r"operation B0\.\d \(stage 0, micro-batch \d\)", ended.logs[0])
