"""What ``fleetpipe doctor`` says of this machine, and of one on which something is wrong."""

from __future__ import annotations

import json
import os
import resource
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import paddle
import pytest

from fleetpipe import cli
from fleetpipe.contrib import doctor
from fleetpipe.contrib.doctor import NOTE, OK, WRONG, Finding, doctor_command, run_checks
from tests.fixtures import Capture, Patch

pytestmark = pytest.mark.once


def states(findings: list[Finding]) -> dict[str, str]:
    return {finding.subject: finding.state for finding in findings}


def test_two_ranks_measure_and_agree(capsys: Capture, tmp_path: Path) -> None:
    begin = time.monotonic()
    assert cli.main(["doctor", "--json", "--checkpoint-dir", str(tmp_path / "new")]) == 0
    assert time.monotonic() - begin < 120
    result = json.loads(capsys.readouterr().out)
    found = {one["subject"]: one for one in result["findings"]}
    assert result["wrong"] == 0
    assert found["parity"]["text"].endswith("bit-exact (losses, gradients and parameters)")
    for transport in ("sockets", "process_group"):
        figures = found[transport]["figures"]
        assert 1e-6 < figures["latency_seconds"] < 1
        assert 1e6 < figures["bytes_per_second"] < 1e12
    assert list(tmp_path.iterdir()) == []


def test_what_is_wrong_is_said_with_what_to_do(
    capsys: Capture, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 4096))
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert cli.main(["doctor", "--nproc", "1", "--checkpoint-dir", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].endswith(": 1 wrong")
    (place,) = [n for n, line in enumerate(lines) if line.startswith("WRONG ")]
    assert lines[place + 1].strip() == (
        "what to do: ulimit -n 4096, in the shell that starts the ranks"
    )
    assert any("set OMP_NUM_THREADS=" in line for line in lines)


def test_a_folder_that_takes_no_file(tmp_path: Path, monkeypatch: Patch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    finding = doctor._check_checkpoint_folder(tmp_path)
    assert (finding.state, finding.text) == (WRONG, f"{tmp_path}: No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_a_check_that_fails_is_wrong() -> None:
    def check() -> Finding:
        raise IndexError("pop from empty list")

    (finding,) = run_checks({"ports": check})
    assert (finding.subject, finding.state) == ("ports", WRONG)
    assert finding.text == "IndexError: pop from empty list"


def card(capability: tuple[int, int], archs: list[int] | None) -> Any:
    cuda = SimpleNamespace(
        get_device_capability=lambda: capability,
        device_count=lambda: 2,
        get_device_name=lambda: "Card",
    )
    version = SimpleNamespace(full_version="2.6.2", cuda=lambda: "11.8")
    if archs is not None:
        version.cuda_archs = lambda: archs
    device, functional = SimpleNamespace(cuda=cuda), paddle.nn.functional
    computes = {"ones": paddle.ones, "matmul": paddle.matmul}
    nn = SimpleNamespace(functional=SimpleNamespace(conv2d=functional.conv2d))
    return SimpleNamespace(device=device, version=version, nn=nn, **computes)


@pytest.mark.parametrize(
    ("capability", "archs", "state"),
    [
        ((8, 6), [70, 80, 90], OK),
        ((12, 0), [70, 80, 90], WRONG),
        ((9, 0), [], OK),
        # The wheel of PyPI does not say it: it has no code for an H100, or for a P100.
        ((8, 9), None, OK),
        ((9, 0), None, WRONG),
        ((6, 0), None, WRONG),
    ],
)
def test_a_card_is_compared_with_the_wheel(
    capability: tuple[int, int], archs: list[int] | None, state: str
) -> None:
    finding = doctor_command._check_card(card(capability, archs), "gpu:0")
    assert finding.state == state
    assert "compute capability {}.{}".format(*capability) in finding.text


def test_a_wheel_without_its_libraries_is_wrong() -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("\n(PreconditionNotMet) The library (libcublas.so) ..\n  Suggestions")

    paddle_on_card = card((8, 0), None)
    paddle_on_card.matmul = fails
    finding = doctor_command._check_card(paddle_on_card, "gpu:0")
    reason = "(PreconditionNotMet) The library (libcublas.so) .."
    assert (finding.state, finding.text[-len(reason) :]) == (WRONG, reason)


def test_what_the_ranks_did_not_come_to_is_wrong() -> None:
    results = {"sockets": {"4": 2e-5, "1000000": 1e-3}}
    sockets = doctor_command._transport_finding("sockets", results, "")
    assert sockets.text == "4 bytes in 20 us, 1.00 GB/s one way"
    group = doctor_command._transport_finding(
        "process_group", results, "the ranks did not end within 90 s"
    )
    assert (group.state, group.text) == (WRONG, "the ranks did not end within 90 s")
    refused = {"process_group": {"error": "ranks share a card\n  fix: ..", "refused": True}}
    assert doctor_command._transport_finding("process_group", refused, "").state == NOTE
    failed = {"parity": {"passed": False, "verdict": "parity: a\nparity: FAILED, largest .."}}
    assert doctor_command._parity_finding(2, failed, "").state == WRONG


def test_a_clock_that_is_wrong_is_noted() -> None:
    assert doctor.check_clock("node", -0.1, -0.1).state == OK
    finding = doctor.check_clock("node", 60.0, -60.2)
    assert (finding.state, finding.text) == (NOTE, "60 s from this host's")
