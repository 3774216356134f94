"""What a program configures, and what is refused of it before any process waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fleetpipe.contrib.compat.colossalai import launch_from_torch
from fleetpipe.contrib.compat.colossalai.context import Config
from fleetpipe.errors import ConfigError, UsageError


def test_a_mapping_and_a_file_say_the_same(tmp_path: Path) -> None:
    file = tmp_path / "config.py"
    file.write_text(
        "BATCH_SIZE = 64\nNUM_MICRO_BATCHES = 4\nparallel = dict(pipeline=dict(size=2), tensor=1)\n"
    )
    for given in (
        str(file),
        {"NUM_MICRO_BATCHES": 4, "BATCH_SIZE": 64, "parallel": {"pipeline": 2}},
    ):
        config = Config.read(given)
        assert (config.NUM_MICRO_BATCHES, config.degree("pipeline")) == (4, 2)
        assert config.BATCH_SIZE == 64
    assert Config.read({}).degree("pipeline") == 1
    # A program's own.
    assert Config.read({"NUM_EPOCHS": 2, "NUM_BATCHES": 9, "MICRO_BATCH_SIZE": 4}).NUM_EPOCHS == 2
    with pytest.raises(AttributeError):
        print(config.SIZE)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"NUM_MICRO_BATCHES": 0}, "NUM_MICRO_BATCHES must be a whole number"),
        ({"NUM_MICRO_BATCHES": True}, "NUM_MICRO_BATCHES must be a whole number"),
        ({"NUM_CHUNKS": 1.5}, "NUM_CHUNKS must be a whole number"),
        ({"parallel": {"pipeline": "2"}}, r"parallel\['pipeline'\] must be a whole number"),
        ({"parallel": {"tensor": {"size": 2, "mode": "1d"}}}, "mp_degree of fleetpipe.fleet"),
        ({"NUM_MICROBATCHES": 4}, "no entry 'NUM_MICROBATCHES'\n.* mean 'NUM_MICRO_BATCHES'"),
        ({"TENSORSHAPE": (4, 2)}, "did you mean 'TENSOR_SHAPE'"),
        ({"parallel": {"pipelines": 2}}, "parallel has no entry 'pipelines'"),
        ({"fp16": {"mode": "naive"}}, "fp16 is not configured here"),
        ({"clip_grad_norm": 1.0}, "grad_clip=paddle.nn.ClipGradByGlobalNorm"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_refused(config: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        launch_from_torch(config)


def test_what_is_no_configuration_is_refused() -> None:
    with pytest.raises(UsageError, match="a mapping or the path"):
        launch_from_torch(3)  # type: ignore[arg-type]
