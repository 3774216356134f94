"""What mkdocs.yml needs beyond its settings: ``--help``, the notebook, pictures, docstrings."""

from __future__ import annotations

import io
import json
import os
import re
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import griffe

from fleetpipe.cli import COMMANDS, main
from fleetpipe.contrib import SHORTER

MARK = "<!-- help -->"
NOTEBOOK = "<!-- notebook -->"
_NOTEBOOK_FILE = Path(__file__).parent.parent / "docs" / "notebook.ipynb"
#: ``<!-- picture: ZBV --ranks 4 --micro-batches 8 -->``: what ``fleetpipe schedule`` is given.
_PICTURE = re.compile(r"<!-- picture: (.*) -->")
_ROLE = re.compile(r":(?:class|func|meth):`~?([^`]+)`")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs with the text of each page; returns the text to show."""
    if NOTEBOOK in markdown:
        return markdown.replace(NOTEBOOK, cells())
    if MARK in markdown:
        return markdown.replace(MARK, every_help())
    return _PICTURE.sub(lambda found: picture(found[1].split()), markdown)


def picture(words: list[str]) -> str:
    """Returns the picture of a schedule as SVG that stands in the page."""
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        file = Path(folder) / "picture.svg"
        if main(["schedule", *words, "--plot", str(file)]) != 0:
            raise SystemExit(f"fleetpipe schedule {' '.join(words)} --plot fails")
        svg = file.read_text(encoding="utf-8")
    return f'<div role="img" aria-label="{" ".join(words)}">{_in_a_page(svg)}</div>'


def _in_a_page(svg: str) -> str:
    # Markdown ends a block of HTML at an empty line, and the page gives the width.
    svg = re.sub(r"\n\s*\n", "\n", svg[svg.index("<svg") :])
    return re.sub(
        r'width="[^"]*" height="[^"]*"', 'style="width: 100%; height: auto"', svg, count=1
    )


def cells() -> str:
    """Returns the cells of the notebook as Markdown, without its title: the page has one."""
    found = json.loads(_NOTEBOOK_FILE.read_text(encoding="utf-8"))["cells"]
    texts = []
    for cell in found:
        text = "".join(cell["source"])
        texts.append(f"```python\n{text}\n```" if cell["cell_type"] == "code" else text)
        texts += [shown(output) for output in cell.get("outputs", ())]
    return "\n\n".join(texts).partition("\n")[2]


def shown(output: dict[str, Any]) -> str:
    """Returns what a cell of the notebook has shown, as it stands in the page."""
    if "text" in output:
        return f"```text\n{''.join(output['text']).rstrip()}\n```"
    svg = "".join(output["data"]["image/svg+xml"])
    return f'<div role="img" aria-label="schedule">{_in_a_page(svg)}</div>'


def every_help() -> str:
    """Returns a section with the help of ``fleetpipe`` and of each of its commands."""
    words = [[], *([command.name] for command in COMMANDS)]
    return "\n".join(
        f"## {' '.join(['fleetpipe', *each])}\n\n```text\n{_help(each)}```\n" for each in words
    )


def _help(words: list[str]) -> str:
    with mock.patch.dict(os.environ, COLUMNS="90"), redirect_stdout(io.StringIO()) as text:
        if main([*words, "--help"]) != 0:
            raise SystemExit(f"fleetpipe {' '.join(words)} --help fails")
    return text.getvalue()


class Docstrings(griffe.Extension):
    """Writes docstrings as Markdown; of a module's only the summary, for the rest is about code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called with everything that was found in the package."""
        if obj.docstring is None:
            return
        text = _ROLE.sub(r"`\1`", obj.docstring.value)
        text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
        obj.docstring.value = text.split("\n\n")[0] if obj.is_module else text

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Called with the package; gives it the paths by which users import its extras."""
        for shorter, extra in SHORTER.items():
            path, name = shorter.removeprefix(f"{pkg.path}.").split("."), extra.split(".")
            parent = pkg[path[:-1]] if path[1:] else pkg
            # A stub beside a shorter path tells type checkers only that the path is there.
            parent.members.pop(path[-1], None)
            parent.set_member(path[-1], griffe.Alias(path[-1], pkg[["contrib", *name]]))
