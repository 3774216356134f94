"""Makes pictures of a real run anew: the page of watch, that of report, and the bar in a terminal.

    .venv/bin/python .ci/pictures.py

It needs Chromium and Pillow, and takes a minute or two; nothing else runs it.
"""

from __future__ import annotations

import contextlib
import fcntl
import html
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time
import urllib.request
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
ASSETS = ROOT / "docs" / "assets"
PORT = 9117
PAGE = f"http://localhost:{PORT}/"
#: The step from which the job is looked at.
WATCHED = 150
COLUMNS = 104
FLEETPIPE = [sys.executable, "-m", "fleetpipe"]
#: What is typed; the bar is that of verbose=1.
TRAIN = "python train.py --data.rows 10000 --train.epochs 6"
#: So much work for each action that the picture is of it.
LARGER = (
    *("--model.width=512", "--data.rows=4000", "--train.batch_size=400"),
    "--train.learning_rate=0.002",
)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
#: Has rank 1 killed in step 120 of every attempt.
STRUCK = """from fleetpipe.dygraph.train.observers import of_all
from tests.chaos import Struck
of_all.append(lambda _: Struck("B1.3", 120))
"""
#: What Paddle says of itself, and fleetpipe's commands keep quiet.
_QUIET = re.compile("INFO|FLAGS|====|ccache|warnings.warn")
SCREEN = """<!DOCTYPE html><meta charset="utf-8"><style>
body {{ margin: 0; background: #16191d; }}
pre {{ margin: 0; padding: 14px 18px; color: #dfe3e8; }}
pre {{ font: 13px/1.45 "DejaVu Sans Mono", monospace; }}
</style><pre>{}</pre>"""


def main() -> None:
    """Makes a project, kills a rank of its training once, and looks at page and terminal."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        subprocess.run([*FLEETPIPE, "new", "spirals"], cwd=home, check=True)
        project = home / "spirals"
        script = project / "train.py"
        text = script.read_text(encoding="utf-8")
        struck = text.replace("import fleetpipe\n", f"{STRUCK}import fleetpipe\n", 1)
        script.write_text(struck, encoding="utf-8")
        launch = ["launch", "--nproc_per_node", "2", "--serve", str(PORT)]
        with subprocess.Popen([*FLEETPIPE, *launch, "train.py", *LARGER], cwd=project) as training:
            watch(home)
        script.write_text(text, encoding="utf-8")
        if training.returncode:
            raise SystemExit("the training has failed")
        subprocess.run([*FLEETPIPE, "report", "run"], cwd=project, check=True)
        report = (project / "report.html").as_uri()
        photograph(report, ASSETS / "report.png", 1180, 1600, home)
        screen = home / "screen.html"
        lines = terminal(project)
        screen.write_text(SCREEN.format(html.escape("\n".join(lines))), encoding="utf-8")
        height = 28 + round(13 * 1.45 * len(lines))
        photograph(screen.as_uri(), ASSETS / "progress.png", COLUMNS * 8 + 36, height, home)


def watch(home: Path) -> None:
    """Looks at the training after a rank was killed, and the job has gone on for some steps."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{PAGE}status.json") as answer:
            status = json.load(answer)
            if status["restarts"] and status["step"] >= WATCHED:
                photograph(PAGE, ASSETS / "watch.png", 1180, 1330, home)
                return
        time.sleep(0.1)
    raise SystemExit("the training was not seen after its restart")


def terminal(project: Path) -> list[str]:
    """Returns what a terminal shows in the middle of a training."""
    script = project / "train.py"
    text = script.read_text(encoding="utf-8").replace("        LogMetricByEpoch(),\n", "")
    script.write_text(text.replace("verbose=0,\n", "verbose=1,\n", 1), encoding="utf-8")
    shutil.rmtree(project / "run")
    process, descriptor = pty.fork()
    if process == 0:
        os.chdir(project)
        os.execv(sys.executable, [sys.executable, *TRAIN.split()[1:]])
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    seen = b""
    while True:
        try:
            seen += os.read(descriptor, 65536)
        except OSError:  # as Linux says that the other end is closed
            break
    os.waitpid(process, 0)
    end = re.search(rb"epoch 4/\d+:\s+[4-7]\d%[^\r]*", seen)
    if end is None:
        raise SystemExit("the terminal has shown no bar in the middle of the fourth epoch")
    return [f"$ {TRAIN}", *shown(seen[: end.end()].decode())]


def shown(text: str) -> list[str]:
    """Returns the lines of a screen after some output: a return writes over the line it is in."""
    lines = [""]
    for part in re.split(r"(\r|\n)", re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)):
        if part == "\n":
            lines.append("")
        elif part != "\r" and part:
            lines[-1] = part + lines[-1][len(part) :]
    kept = [line.rstrip() for line in lines if line.strip() and not _QUIET.search(line)]
    return [
        line[start : start + COLUMNS] for line in kept for start in range(0, len(line), COLUMNS)
    ]


def photograph(page: str, target: Path, width: int, height: int, home: Path) -> None:
    """Takes a picture of a page, in few colours."""
    browser = shutil.which("chromium") or "google-chrome"
    profile = tempfile.mkdtemp(dir=home)
    window = [f"--window-size={width},{height}", f"--user-data-dir={profile}"]
    command = [browser, *FLAGS, *window, f"--screenshot={target}", page]
    subprocess.run(command, check=True, timeout=120, stderr=subprocess.DEVNULL)
    image = Image.open(target).convert("RGB")
    image.quantize(256, dither=Image.Dither.NONE).save(target, optimize=True)


if __name__ == "__main__":
    main()
