"""The README and docs/: every Python block runs as it is printed, links lead somewhere.

The blocks of a page follow each other in one process. What a block takes for granted, such as a
model of the reader's, stands before it in a comment that no reader sees: ``<!-- given: .. -->``.
A block that is followed by the text of an error of fleetpipe's raises that error. `make docs`
builds the site; here is what can be seen without its tools.
"""

from __future__ import annotations

import importlib
import logging
import os
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import paddle
import pytest

from fleetpipe import fleet
from fleetpipe.config import FLEETPIPE_DEFAULTS
from fleetpipe.errors import FleetPipeError
from fleetpipe.fleet.meta_parallel.pipeline_parallel import pipeline_parallel_callbacks_
from fleetpipe.schedules import build
from tests.fixtures import Patch
from tests.launching import ROOT
from tests.static.networks import static_mode

pytestmark = pytest.mark.every_row

BLOCK = re.compile(
    r"(?:<!-- given:\n(?P<given>.*?)-->\n)?"
    r"^```python\n(?P<code>.*?)^```$"
    r"(?:\n\n```text\nfleetpipe\.errors\.(?P<error>.*?)\n```$)?",
    re.DOTALL | re.MULTILINE,
)
DOCS = ROOT / "docs"
ALL = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
#: Their scripts need a library: tests/libraries, in an environment of its own, and
#: tests/contrib/ray.
ELSEWHERE = {DOCS / "libraries.md", DOCS / "ray.md"}
PAGES = [
    page for page in ALL if page not in ELSEWHERE and BLOCK.search(page.read_text(encoding="utf-8"))
]

#: What stands below it on a page writes files once, and is left out on ranks.
ALONE = "<!-- one process from here -->"

#: Whatever these export and is not Paddle's has an entry in the reference.
PUBLIC = (
    "fleetpipe.callbacks",
    "fleetpipe.compat.colossalai",
    "fleetpipe.compat.mindspore",
    "fleetpipe.dygraph",
    "fleetpipe.dygraph.tensor_parallel",
    "fleetpipe.fleet",
    "fleetpipe.fleet.meta_parallel",
    "fleetpipe.io",
    "fleetpipe.lora",
    "fleetpipe.parity",
    "fleetpipe.partition",
    "fleetpipe.profiling",
    "fleetpipe.schedules",
    "fleetpipe.schedules.forms",
    "fleetpipe.static",
    "fleetpipe.transport",
)


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """Takes back what a page leaves behind: hooks, a job, programs, static mode, handlers."""
    generator = paddle.get_rng_state()
    notices = logging.getLogger("fleetpipe")
    handlers = notices.handlers[:]
    with static_mode():
        paddle.disable_static()
        yield
    for hooks in pipeline_parallel_callbacks_.hooks.values():
        hooks.clear()
    paddle.set_rng_state(generator)
    notices.handlers[:] = handlers
    notices.getChild("capture").setLevel(logging.NOTSET)


@pytest.mark.usefixtures("own_names")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    skip_what_is_not_here(page)
    run_blocks(page)


def skip_what_is_not_here(page: Path) -> None:
    """Skips a page with a block that needs a library or a newer Paddle."""
    code = "".join(match["code"] for match in BLOCK.finditer(page.read_text(encoding="utf-8")))
    if "plot" in code:
        pytest.importorskip("matplotlib")
    for option in ('"ep_degree"', '"rehearse"', "hugging_face.json"):
        if option in code and paddle.version.full_version.startswith("2."):
            pytest.skip(f"2.6.2 has no {option}")


def run_blocks(page: Path) -> None:
    """Runs the blocks of a page one after another, in the folder where this process is."""
    text = page.read_text(encoding="utf-8")
    if "PADDLE_TRAINER_ID" in os.environ:
        text = text.partition(ALONE)[0]
    names = {"__name__": "__main__", "FIRST_SCRIPT": first_script()}
    for match in BLOCK.finditer(text):
        exec(match["given"] or "", names)
        # Empty lines before it, so that an error has the line of the page.
        above = "\n" * text.count("\n", 0, match.start("code"))
        code = compile(above + match["code"], page, "exec")
        if match["error"] is None:
            exec(code, names)
            continue
        with pytest.raises(FleetPipeError) as caught:
            exec(code, names)
        assert f"{type(caught.value).__name__}: {caught.value}" == match["error"]


def first_script() -> str:
    """Returns the first script of docs/dygraph.md, up to its data."""
    text = (DOCS / "dygraph.md").read_text(encoding="utf-8")
    return next(BLOCK.finditer(text))["code"].partition("paddle.seed")[0]


def test_every_comment_stands_before_a_block() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        used = [match["given"] for match in BLOCK.finditer(text) if match["given"]]
        assert text.count("<!-- given:") == len(used), page


def test_no_link_is_broken() -> None:
    for page in ALL:
        for link in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text(encoding="utf-8")):
            file, _, heading = link.partition("#")
            target = page.parent / file if file else page
            assert target.exists(), f"{page.name}: {link}"
            assert not heading or heading in headings(target), f"{page.name}: {link}"


def headings(page: Path) -> set[str]:
    """The names by which links find the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_index_names_every_page() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    pages = [page.name for page in DOCS.glob("*.md") if page.name != "index.md"]
    assert [name for name in pages if f"({name})" not in index] == []


def test_the_reference_has_every_public_name() -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (DOCS / "reference").iterdir())
    shown = []
    for path in re.findall(r"^::: (\S+)$", pages, re.MULTILINE):
        entry = pkgutil.resolve_name(path)
        shown += exported(entry) if isinstance(entry, ModuleType) else [entry]
    for module in map(importlib.import_module, PUBLIC):
        for each in exported(module):
            assert any(each is entry for entry in shown), f"{module.__name__}: {each}"


def exported(module: ModuleType) -> list[object]:
    """What a module of fleetpipe's exports, without modules and what is Paddle's."""
    names = getattr(module, "__all__", [name for name in vars(module) if name[0] != "_"])
    values = [getattr(module, name) for name in names]
    return [
        value
        for value in values
        if not isinstance(value, ModuleType)
        and not getattr(value, "__module__", "").startswith("paddle")
    ]


def test_the_architecture_shows_what_the_engine_does() -> None:
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    block = next(block for block in page.split("```text\n") if block.startswith("F0.0"))
    told = [line.split("  ")[0] for line in block.split("```")[0].splitlines()]
    plan = build("1F1B", ranks=2, micro_batches=3).lower()
    assert " ".join(told).split() == [str(op) for op in plan.ops[0]]


def test_every_option_of_fleetpipes_is_explained() -> None:
    page = (DOCS / "dygraph.md").read_text(encoding="utf-8")
    section = page.split("## Options of fleetpipe's own")[1].split("## ")[0]
    documented = fleet.DistributedStrategy.fleetpipe_configs.__doc__ or ""
    for option in FLEETPIPE_DEFAULTS:
        assert f"`{option}`" in section
        assert f"``{option}``" in documented
