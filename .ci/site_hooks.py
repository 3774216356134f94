"""What mkdocs.yml needs beyond its settings: the text of ``--help``, and docstrings as Markdown."""

from __future__ import annotations

import io
import os
import re
from contextlib import redirect_stdout
from typing import Any
from unittest import mock

import griffe

from fleetpipe.cli import COMMANDS, main

MARK = "<!-- help -->"
_ROLE = re.compile(r":(?:class|func|meth):`~?([^`]+)`")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs with the text of each page; returns the text to show."""
    return markdown.replace(MARK, every_help()) if MARK in markdown else markdown


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
