"""What is asked of Paddle: of this process's own card, of its casts, and of its launcher."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import paddle
import pytest

from fleetpipe.paddle_api import distributed, tensor
from fleetpipe.paddle_api.amp import casts_automatically, casts_of_now, casts_visible
from fleetpipe.paddle_api.device import process_bytes
from fleetpipe.paddle_api.tensor import to_device, to_host
from tests.fixtures import Launch


def test_any_thread_is_told_of_the_memory_of_this_processs_card(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Unless it is told a device, Paddle asks for the thread's, in a new thread the first one.
    by_device = {None: 0, "gpu:0": 0, "gpu:3": 7 << 20}
    monkeypatch.setattr(paddle.device, "get_device", lambda: "gpu:3")
    monkeypatch.setattr(paddle.device.cuda, "memory_allocated", lambda of=None: by_device[of])
    assert process_bytes() == 7 << 20


def test_a_copy_for_the_host_waits_for_what_is_computed_and_for_no_other_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[object] = []
    alone: Any = SimpleNamespace(_copy_to=lambda _, blocking: calls.append(blocking))
    # Of a graph a PyLayer's part takes Python's lock where it goes, as it may in CUDA's threads.
    of_card: Any = SimpleNamespace(detach=lambda: alone)
    monkeypatch.setattr(tensor, "synchronize", lambda: calls.append("waited"))
    to_host(of_card)
    assert calls == [False, "waited"]


def test_static_mode_does_not_hide_the_device() -> None:
    copied_to: Any = SimpleNamespace(_copy_to=lambda place, blocking: place)
    paddle.enable_static()
    try:
        assert str(to_device(copied_to)) == str(paddle.CPUPlace())
    finally:
        paddle.disable_static()


@pytest.mark.parametrize("by_host", [False, True])
def test_the_card_that_paddles_start_chooses_stays(
    monkeypatch: pytest.MonkeyPatch, by_host: bool
) -> None:
    returned: list[bool] = []
    monkeypatch.setattr(distributed, "device_setter", lambda: lambda: returned.append(True))
    monkeypatch.setattr(distributed, "communicates_over_host", lambda: by_host)
    with distributed.replacing_store_and_groups(lambda: None, lambda make: None):
        pass
    assert returned == [True] * by_host


def test_casts_that_are_only_visible_cast_nothing() -> None:
    assert casts_of_now() is None
    with casts_visible("float16") as shown:
        assert shown is not None
        assert casts_of_now() == shown
        assert not casts_automatically()
        with paddle.amp.auto_cast(enable=False):
            assert casts_of_now() is None
        assert casts_of_now() == shown
    assert casts_of_now() is None


#: Paddle learns of a process only when it has begun.
AMID = """
    import os, signal, subprocess, sys
    from fleetpipe.paddle_api import launcher

    class Popen(subprocess.Popen):
        def __init__(self, *words, **options):
            super().__init__(*words, **options)
            print("started")
            os.kill(os.getpid(), signal.SIGABRT)

    sys.argv[1:] = ["--nproc_per_node", "2", "train.py"]
    names = ["on_start", "on_end", "exit_code", "is_explained", "allow_sharing"]
    launcher.launch(**dict.fromkeys(names, print), popen=Popen)
    """


@pytest.mark.processes
def test_a_signal_amid_the_start_of_ranks_waits_and_leaves_none(
    launch: Launch, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("import time; time.sleep(100)")
    # It raises an error if a process is left.
    job = launch(AMID, None, cwd=tmp_path, check=False)
    assert (job.returncode, job.logs[0].count("started")) == (6, 2)
