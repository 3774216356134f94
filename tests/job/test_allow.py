"""What a closed border lets pass, and what its refusal says."""

from __future__ import annotations

import pytest

from fleetpipe import fleet
from fleetpipe.config import BORDERS, PipelineConfig
from fleetpipe.errors import ConfigError
from fleetpipe.job.allow import Allow

pytestmark = pytest.mark.once


def _read(allow: object) -> tuple[str, ...]:
    strategy = fleet.DistributedStrategy()
    strategy.fleetpipe_configs = {"allow": allow}
    return PipelineConfig.from_strategy(strategy).allow


def test_a_refusal_names_the_line_that_lets_it_pass() -> None:
    with pytest.raises(ConfigError, match="no row for it") as caught:
        Allow().refuse("optimizer", "MySAM", "no row for it", fix="take AdamW")
    line = str(caught.value).rpartition("know that it is right, ")[2]
    options: dict[str, dict[str, object]] = {}
    exec(line.replace("strategy.fleetpipe_configs", "options['given']"), {"options": options})
    allow = Allow(_read(**options["given"]))
    allow.refuse("optimizer", "MySAM", "no row for it", fix="use SGD")
    assert allow.used == {"optimizer:MySAM": "no row for it"}


def test_what_is_allowed_opens_no_other_border() -> None:
    allow = Allow(("optimizer:MySAM",))
    for border, name in (("clip", "MySAM"), ("optimizer", "MySAM2")):
        with pytest.raises(ConfigError):
            allow.refuse(border, name, "no row for it", fix="use SGD")
    assert not allow.used


@pytest.mark.parametrize("value", ["MySAM", "optimiser:MySAM", "optimizer:", [3], None])
def test_an_entry_that_names_no_border_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="BORDER:NAME"):
        _read(value)


def test_one_text_is_a_list_of_one() -> None:
    assert all(_read(f"{border}:X") == (f"{border}:X",) for border in BORDERS)
