"""Which families of models are run: all of them, or those that the environment names."""

from __future__ import annotations

import os
from typing import TypeVar

#: Names families with a comma between them, as ``llama,gpt``; `make test-libraries-short` sets it.
VARIABLE = "FLEETPIPE_TEST_FAMILIES"

Kind = TypeVar("Kind")


def chosen(models: dict[str, Kind]) -> dict[str, Kind]:
    """Returns those of the models that are to be run, by name.

    Raises:
        KeyError: The environment names another.
    """
    names = os.environ.get(VARIABLE)
    return {name: models[name] for name in names.split(",")} if names else models
