"""What a pipeline whose ranks have parts of sequences does not run together with."""

from __future__ import annotations

from typing import Any

import pytest
from paddle import nn

from fleetpipe.dygraph.train.switches import Switches
from fleetpipe.errors import ConfigError
from fleetpipe.job.job import Job
from tests.dygraph.sequences.test_attention import Fixed
from tests.pipelines import job, pipeline


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has a job believe that another rank has the rest of each sequence."""
    along = Job.along

    def of_two(self: Job, *axes: str) -> Any:
        return Fixed(2) if axes == ("sep", "cp") else along(self, *axes)

    monkeypatch.setattr(Job, "along", of_two)


def layers() -> list[Any]:
    return [nn.Linear(6, 5), nn.Linear(5, 4)]


@pytest.mark.usefixtures("split")
def test_sequence_chunks_are_refused_by_name() -> None:
    with (
        job(2, 4, "Seq1F1B", slices=2),
        pytest.raises(ConfigError, match=r"(?s)Seq1F1B cuts sequences.*sep_degree x cp_degree = 2"),
    ):
        pipeline(layers(), loss_fn=nn.CrossEntropyLoss())


@pytest.mark.usefixtures("split")
def test_undivided_losses_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    delayed = Switches(delay_scale_loss=True)
    monkeypatch.setattr(Switches, "from_strategy", lambda *_: delayed)
    with job(2), pytest.raises(ConfigError, match="delay_scale_loss"):
        pipeline(layers(), loss_fn=nn.CrossEntropyLoss())
