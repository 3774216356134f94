"""The page of a job that runs: the report's look, and a script that reads the board again."""

from __future__ import annotations

from functools import cache

from jinja2 import ChoiceLoader, Environment, PackageLoader

from fleetpipe.report.page import templates
from fleetpipe.version import __version__
from fleetpipe.watch.board import JobBoard


@cache
def _environment() -> Environment:
    shared = templates()
    loaders = [PackageLoader(__package__), shared.loader]
    return shared.overlay(loader=ChoiceLoader([loader for loader in loaders if loader]))


def page(board: JobBoard) -> str:
    """Returns the page as the text of an HTML file that loads nothing but the board."""
    template = _environment().get_template("watch.html")
    return str(template.render(board=board.content(), version=__version__))
