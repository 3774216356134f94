"""``fleetpipe.install()``: from within a script what ``fleetpipe run`` does, or an error."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

import paddle
import pytest
from paddle.distributed import fleet as theirs

import fleetpipe
from fleetpipe.errors import ConfigError
from tests.launching import Finished, command

SCRIPT = """
import sys
import fleetpipe
assert "paddle" not in sys.modules
fleetpipe.install()
fleetpipe.install()
import paddle
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import parallel_layers, PipelineLayer
from fleetpipe import fleet as ours
assert fleet is paddle.distributed.fleet is ours
assert PipelineLayer is parallel_layers.PipelineLayer is ours.meta_parallel.PipelineLayer
"""


def test_a_script_that_installs_first_finds_fleetpipe() -> None:
    done = command(sys.executable, "-c", SCRIPT)
    assert done.returncode == 0, done.stderr
    # Nor does taking it back fail when Python ends.
    assert "Exception ignored" not in done.stderr


def test_too_late_is_said_and_changes_nothing() -> None:
    # This very module has imported Paddle's, and others of these tests may have.
    with pytest.raises(ConfigError, match=r"came too late\n.*has imported paddle.distributed.fl"):
        fleetpipe.install()
    assert sys.modules["paddle.distributed.fleet"] is theirs


STOCK = """
import paddle
{imports}
strategy = fleet.DistributedStrategy()
strategy.hybrid_configs = {{"pp_degree": 2}}
fleet.init(is_collective=True, strategy=strategy)
layers = [LayerDesc(paddle.nn.Linear, 4, 4)] * 2
PipelineLayer(layers, topology=fleet.get_hybrid_communicate_group().topology())
"""


def test_warnings_may_be_errors() -> None:
    imports = "from fleetpipe.fleet.meta_parallel import LayerDesc, PipelineLayer"
    script = "from fleetpipe import fleet\n" + STOCK.format(imports=imports)
    done = command(sys.executable, "-W", "error", "-c", script)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(paddle.__version__ < "3", reason="fleet.init of 2.6.2 fails by itself")
@pytest.mark.parametrize(
    ("ranks", "told"), [(None, "from fleetpipe import fleet, for"), (2, "that of paddle.distrib")]
)
def test_a_stock_init_with_a_pipeline_layer_of_fleetpipes_is_named(
    launch: Callable[..., Finished], ranks: int | None, told: str
) -> None:
    imports = [
        "from paddle.distributed import fleet",
        "from fleetpipe.fleet.meta_parallel import LayerDesc, PipelineLayer",
    ]
    done = launch(STOCK.format(imports="\n".join(imports)), ranks, check=False)
    assert done.returncode == 1
    assert told in done.logs[0]


@pytest.mark.skipif(
    paddle.device.is_compiled_with_cuda(), reason="the package for GPUs builds Paddle's own"
)
@pytest.mark.parametrize("order", [1, -1], ids=["fleetpipe first", "Paddle first"])
def test_a_stock_pipeline_layer_in_a_job_of_fleetpipes_is_named(
    launch: Callable[..., Finished], order: int
) -> None:
    imports = [
        "from fleetpipe import fleet",
        "from paddle.distributed.fleet.meta_parallel import LayerDesc, PipelineLayer",
    ]
    done = launch(STOCK.format(imports="\n".join(imports[::order])), None, check=False)
    assert done.returncode == 1
    told = "has no attribute '_device_id'.*\nfleetpipe: the PipelineLayer of this script is stock"
    assert re.search(told, done.logs[0])
