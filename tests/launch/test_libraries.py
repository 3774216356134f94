"""Every name of the table on the page about libraries is there."""

from __future__ import annotations

import re
from typing import Any

import paddle
import pytest

from fleetpipe import fleet
from tests.launching import ROOT
from tests.pipelines import job, pipeline

PAGE = (ROOT / "docs" / "libraries.md").read_text(encoding="utf-8")
#: Names that a library needs, and what has them.
ROWS = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| `(\w+)` \| Paddle\w+ [^|]+ \|", PAGE, re.MULTILINE)


def test_the_table_is_read() -> None:
    assert sum(len(names.split(", ")) for names, _ in ROWS) == 23


@pytest.mark.parametrize(("names", "owner"), ROWS)
def test_a_name_that_a_library_needs_is_fleetpipes(names: str, owner: str) -> None:
    with job(2):
        model: Any = pipeline()
        clip = paddle.nn.ClipGradByGlobalNorm(1.0)
        optimizer = fleet.distributed_optimizer(
            paddle.optimizer.SGD(parameters=model.parameters(), grad_clip=clip)
        )
        here = (model, model.layers, optimizer, optimizer._inner_opt._grad_clip)
        owners = {type(one).__name__: one for one in here}
        owners["meta_parallel"] = fleet.meta_parallel
        for name in re.findall(r"\w+", names):
            assert hasattr(owners[owner], name), name
