"""Which families of models are run: all of them, or those that the environment names."""

from __future__ import annotations

import os
from typing import TypeVar

#: Names families with a comma between them, as ``llama,gpt``; `make test-libraries-short` sets it.
VARIABLE = "FLEETPIPE_TEST_FAMILIES"

Kind = TypeVar("Kind")


def chosen(models: dict[str, Kind]) -> dict[str, Kind]:
    """Returns those of a library's models that are to be run, by name.

    The environment may name others: those of another library.
    """
    names = os.environ.get(VARIABLE)
    if not names:
        return models
    return {name: models[name] for name in names.split(",") if name in models}
