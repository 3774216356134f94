"""A run that is killed in the middle of an epoch, with workers, and started again."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests import byhand
from tests.launching import ROOT

pytestmark = [pytest.mark.processes, pytest.mark.no_paddle]

SCRIPT = f"""
import json, os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from fleetpipe.io import DataLoader
from tests.io.test_loader import Numbers

folder, last = Path(sys.argv[1]), int(sys.argv[2])
loader = DataLoader(Numbers(30, True), batch_size=3, shuffle=True, num_workers=2, seed=1)
saved = folder / "saved.json"
if saved.exists():
    loader.set_state_dict(json.loads(saved.read_text()))
for epoch in range(loader.epoch, 2):
    loader.set_epoch(epoch)
    for number, (samples, drawn) in enumerate(loader):
        with (folder / "seen.jsonl").open("a") as seen:
            seen.write(json.dumps([epoch, samples.tolist(), drawn.tolist()]) + "\\n")
        saved.write_text(json.dumps(loader.state_dict()))
        if (epoch, number) == (1, last):
            os.killpg(0, signal.SIGKILL)  # its workers too, as a host that dies
"""


def test_a_killed_run_goes_on_with_the_same_batches(tmp_path: Path) -> None:
    codes = []
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    # Workers are forked from a fresh process: one that has run other tests has their threads.
    for folder, last in ((killed, 3), (killed, 99), (whole, 99)):
        folder.mkdir(exist_ok=True)
        with byhand.started(SCRIPT, None, str(folder), str(last), folder=tmp_path) as process:
            codes.append(process.wait()[0].code)
    assert codes == [-signal.SIGKILL, 0, 0]
    seen, expected = (
        [json.loads(line) for line in (folder / "seen.jsonl").open()] for folder in (killed, whole)
    )
    assert seen == expected
    assert len(seen) == 20
