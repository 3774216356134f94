"""``fleetpipe.install()``: from within a script what ``fleetpipe run`` does, or an error."""

from __future__ import annotations

import subprocess
import sys

import pytest
from paddle.distributed import fleet as theirs

import fleetpipe
from fleetpipe.errors import ConfigError
from tests.launching import ROOT

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
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    # Nor does taking it back fail when Python ends.
    assert "Exception ignored" not in done.stderr


def test_too_late_is_said_and_changes_nothing() -> None:
    # This very module has imported Paddle's, and others of these tests may have.
    with pytest.raises(ConfigError, match=r"came too late\n.*has imported paddle.distributed.fl"):
        fleetpipe.install()
    assert sys.modules["paddle.distributed.fleet"] is theirs
