"""``fleetpipe parity --whole`` over the examples, a few steps of each: a table of verdicts.

    python -m tests.parity.whole_examples [NAME ..]

``test_command.py`` has those that CI runs; ``make test-whole`` runs all, for about ten minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.launching import ROOT

TUTORIAL = "--layers 18 --width 4 --steps 2 --batch-size 16"
#: By name, the arguments of an example that make it small.
EXAMPLES = {
    "dygraph_mlp": "--hidden 64 --steps 4",
    "static_mlp": "--steps 4",
    "dygraph_gpt": "--width 32 --length 16 --steps 4",
    "dygraph_alexnet": "--steps 2",
    "static_resnet": "--layers 50 --width 8 --steps 2",
    "resnet_cifar": "--layers 50 --width 1 --steps 2 --epochs 1 --batch-size 32",
    "vision_language": "--steps 2 --micro-batches 3 --rows 2 --layers 2 --width 16",
    "colossalai_resnet": TUTORIAL,
    "mindspore_resnet": TUTORIAL,
    "one_hash": "--steps 3 --width 32 --length 16",
}


#: Of those that run on more than two.
RANKS = {"static_resnet": 4}


def verdicts(script: Path, words: str, folder: Path, *options: str) -> dict[str, str]:
    """Returns the verdict of each way in which a script runs, ``NOT`` before one that fails.

    Args:
        script: The script.
        words: Its arguments.
        folder: Where it runs.
        options: Those of ``fleetpipe parity --whole``.
    """
    report = folder / "report.json"
    command = [sys.executable, "-m", "fleetpipe", "parity", "--whole", "--report", str(report)]
    done = subprocess.run(
        [*command, *options, str(script), *words.split()],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert report.is_file(), done.stdout + done.stderr
    rows = json.loads(report.read_text())
    assert done.returncode == (0 if all(row["passed"] for row in rows) else 1)
    return {row["way"]: ("" if row["passed"] else "NOT ") + row["verdict"] for row in rows}


def of_example(name: str, folder: Path) -> dict[str, str]:
    """Returns the verdicts of an example, on ranks too."""
    ranks = str(RANKS.get(name, 2))
    return verdicts(ROOT / "examples" / f"{name}.py", EXAMPLES[name], folder, "--nproc", ranks)


if __name__ == "__main__":
    failed = 0
    for example in sys.argv[1:] or EXAMPLES:
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as home:
            try:
                found = of_example(example, Path(home))
            except AssertionError as error:
                found = {"one process": f"NOT {error}"}
        print(f"{example}: {time.monotonic() - begin:.0f} s")
        for way, verdict in found.items():
            print(f"  {way:<22} {verdict}", flush=True)
        failed += any(verdict.startswith("NOT ") for verdict in found.values())
    print(f"{failed} examples differ from themselves")
    sys.exit(bool(failed))
