"""Every name that a library needs is there, and is on the page about libraries."""

from __future__ import annotations

from typing import Any

import paddle
import pytest

from fleetpipe import fleet
from fleetpipe.launch.libraries import NEEDS, Need
from tests.launching import ROOT
from tests.pipelines import job, pipeline


@pytest.mark.parametrize("need", NEEDS, ids=lambda need: f"{need.owner} {need.names[0]}")
def test_a_name_that_a_library_needs_is_fleetpipes(need: Need) -> None:
    page = (ROOT / "docs" / "libraries.md").read_text()
    names = ", ".join(f"`{name}`" for name in need.names)
    assert f"| {names} | `{need.owner}` | {need.library} | {need.meaning} |" in page
    with job(2):
        model: Any = pipeline()
        clip = paddle.nn.ClipGradByGlobalNorm(1.0)
        optimizer = fleet.distributed_optimizer(
            paddle.optimizer.SGD(parameters=model.parameters(), grad_clip=clip)
        )
        here = (model, model.layers, optimizer, optimizer._inner_opt._grad_clip)
        owners = {type(one).__name__: one for one in here}
        owners["meta_parallel"] = fleet.meta_parallel
        for name in need.names:
            assert hasattr(owners[need.owner], name), name
