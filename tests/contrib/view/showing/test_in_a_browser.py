"""A real run's page in headless Chromium: no errors, every section has its place, no requests."""

from __future__ import annotations

import contextlib
import html
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe.callbacks import MetricsLogger, ThroughputMonitor, TraceSteps
from fleetpipe.cli import main
from tests import pipelines
from tests.contrib.view.job_records import EVIL
from tests.fit.test_model import BATCH, ROWS, STEPS, Digits, layers

pytestmark = pytest.mark.once

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--virtual-time-budget=3000", "--dump-dom"),
)
#: Before the page's own script: keeps errors, also those of the policy of what may be loaded.
FIRST = """<script>
const seen = {errors: []};
addEventListener("error", (event) => seen.errors.push(event.message || String(event.target)), true);
addEventListener("securitypolicyviolation", (event) => seen.errors.push(event.violatedDirective));
</script>"""
#: After it: points at a chart, and measures what is there.
LAST = """<script>
const size = (node) => [node.getBoundingClientRect().width, node.getBoundingClientRect().height];
const area = document.querySelector(".area");
const box = area.getBoundingClientRect();
area.dispatchEvent(new PointerEvent("pointermove", {clientX: box.right, clientY: box.top + 9}));
const tip = document.querySelector(".tip");
seen.tip = [...tip.children].map((line) => line.textContent);
seen.width = [innerWidth, document.documentElement.scrollWidth];
seen.sections = [...document.querySelectorAll("section")].map((node) => [node.id, ...size(node)]);
const shows = (node) => !node.closest("[hidden]");
const visible = (nodes) => [...document.querySelectorAll(nodes)].filter(shows);
const sizes = (nodes) => visible(nodes).map(size);
seen.lines = sizes(".area path.line, .area path.points");
seen.boxes = sizes(".canvas path, .canvas .number, .y span, .x span, th, td, dd");
seen.loaded = performance.getEntriesByType("resource").map((entry) => entry.name);
seen.dark = getComputedStyle(document.body).backgroundColor;
const press = (node, key) => node.dispatchEvent(new KeyboardEvent("keydown", {key}));
const type = (node, ...keys) => keys.forEach((key) => press(node, key));
type(area, "Home");
seen.home = tip.firstChild.textContent.split(",")[0];
type(area, "ArrowRight", "ArrowRight");
seen.right = tip.firstChild.textContent.split(",")[0];
const ends = () => [...area.parentNode.querySelectorAll(".x span")].map((node) => node.textContent);
type(area, "+", "+");
seen.zoomed = [area.classList.contains("zoomed"), ...ends()];
type(area, "0");
seen.whole = [area.classList.contains("zoomed"), ...ends()];
const [slider, axis] = document.querySelectorAll(".tools input, .tools select");
slider.value = 2;
slider.dispatchEvent(new Event("input"));
seen.smoothed = area.querySelectorAll("path.faint").length;
axis.value = "time";
axis.dispatchEvent(new Event("change"));
seen.axis = area.parentNode.querySelector(".axis").textContent;
const steps = document.querySelector("#traced");
steps.value = 0;
steps.dispatchEvent(new Event("change"));
seen.traced = [...document.querySelectorAll(".traced")].map((node) => size(node)[1] > 0);
const told = document.createElement("pre");
told.id = "seen";
document.body.append(told);
setTimeout(() => {
  told.textContent = JSON.stringify(seen);
}, 50);
</script>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a training on two ranks in one process."""
    home = tmp_path_factory.mktemp("report")
    run = home / "run"
    with pipelines.job(pp=2, micro_batches=STEPS, rows=ROWS):
        model = fleetpipe.Model(layers())
        optimizer = paddle.optimizer.Adam(0.01, parameters=model.parameters())
        model.prepare(optimizer, nn.CrossEntropyLoss(), paddle.metric.Accuracy(name=EVIL))
        model.fit(
            Digits(0, 6 * BATCH),
            Digits(1000, 1000 + BATCH),
            batch_size=BATCH,
            epochs=2,
            verbose=0,
            callbacks=[
                ThroughputMonitor(log_freq=3, verbose=0),
                MetricsLogger(run, config={"a": 1}),
                TraceSteps([5, 6], run / "trace"),
            ],
        )
    # A learning rate that differs in its last place draws as flat, and in no endless loop.
    rows = (run / "metrics.jsonl").read_text().splitlines()
    rows[1::2] = [row.replace(": 0.01,", f": {0.01 + 2e-18},") for row in rows[1::2]]
    (run / "metrics.jsonl").write_text("\n".join([*rows, ""]))
    assert main(["report", str(run), "-o", str(home / "page.html")]) == 0
    return home / "page.html"


def looked_at(browser: str, page: Path, width: int, folder: Path, *flags: str) -> Any:
    """What the page has to say of itself in a window of a width, in a frame for narrow ones."""
    text = page.read_text(encoding="utf-8")
    probed = text.replace("<title>", f"{FIRST}<title>", 1).replace("</body>", f"{LAST}</body>")
    frame = f'<iframe style="width:{width}px;height:900px;border:0" srcdoc="{html.escape(probed)}">'
    relay = """<script>addEventListener("load", () => setTimeout(() => {
        const told = document.querySelector("iframe").contentDocument.querySelector("#seen");
        document.body.append(told.cloneNode(true)); }, 200));</script>"""
    file = folder / "probed.html"
    file.write_text(f"<!DOCTYPE html><body>{frame}</iframe>{relay}</body>", encoding="utf-8")
    done = None
    for attempt in range(3):
        profile = folder / f"profile-{attempt}"
        words = [browser, *FLAGS, *flags, f"--user-data-dir={profile}", file.as_uri()]
        # Headless Chromium stays silent at some starts, on an idle machine too.
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(words, capture_output=True, text=True, timeout=40, check=True)
            break
    assert done is not None, "the browser has not started in three attempts"
    told = re.findall(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert told, done.stderr
    return json.loads(html.unescape(told[-1]))


@pytest.mark.parametrize("width", [375, 1280])
def test_the_page_of_a_run_in_a_browser(
    browser: str, page: Path, width: int, tmp_path: Path
) -> None:
    flags = ["--force-dark-mode"] if width == 375 else []
    seen = looked_at(browser, page, width, tmp_path, *flags)
    assert seen["errors"] == []
    assert seen["loaded"] == []
    assert seen["width"] == [width, width]
    assert [name for name, *_ in seen["sections"]] == [
        *("curves", "throughput", "ranks", "pipeline", "stages", "attempts"),
        *("events", "evaluations", "configuration"),
    ]
    assert all(wide > 300 and high > 40 for _, wide, high in seen["sections"])
    # Training and evaluation of loss and metric; rate; throughput, step time, busy share; memory.
    assert len(seen["lines"]) == 9
    assert all(wide > 100 for wide, _ in seen["lines"])
    assert len(seen["boxes"]) > 100
    assert all(wide > 0 and high > 0 for wide, high in seen["boxes"])
    rows = (page.parent / "run" / "metrics.jsonl").read_text().splitlines()
    last = {row["phase"]: row for row in map(json.loads, rows)}
    assert seen["tip"][0].startswith("step 12, after ")
    told = [line.rsplit(" ", 1) for line in seen["tip"][1:]]
    assert [name for name, _ in told] == ["training", "evaluation"]
    assert [float(value) for _, value in told] == [
        pytest.approx(last[phase]["loss"], rel=1e-5) for phase in ("train", "eval")
    ]
    assert (seen["home"], seen["right"]) == ("step 1", "step 3")
    assert seen["zoomed"][0]
    assert "3" in seen["zoomed"]
    assert "10" not in seen["zoomed"]
    assert not seen["whole"][0]
    assert "10" in seen["whole"]
    assert seen["smoothed"] == 1
    assert seen["axis"] == "elapsed time"
    assert seen["traced"] == [True, False]
    assert seen["dark"] == ("rgb(17, 20, 24)" if flags else "rgb(255, 255, 255)")
