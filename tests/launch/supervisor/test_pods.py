"""The process that loads Paddle's launcher, where it cannot."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fleetpipe.errors import UsageError
from fleetpipe.launch.supervisor.pods import Order, Pods

KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize(
    ("paddle", "code", "got"),
    [
        ("raise ModuleNotFoundError('No module named paddle')", 1, "No module named paddle"),
        ("raise OSError('first line\\n  a second one')", 1, "first line\n  a second one\n"),
        (KILLED, 137, "not a word of why"),
    ],
)
def test_one_that_ends_before_it_serves_is_one_error_with_its_last_words(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], paddle: str, code: int, got: str
) -> None:
    (tmp_path / "paddle.py").write_text(paddle)
    pods = Pods({**os.environ, "PYTHONPATH": str(tmp_path)}, tmp_path)
    pods.start(Order([], {}))
    with pytest.raises(UsageError, match=f"cannot be loaded: .* ended with {code}") as raised:
        pods.code()
    pods.close()
    assert got in str(raised.value)
    assert capfd.readouterr().err == ""
