"""The library that is installed here, PaddleNLP or PaddleFormers: its workers ask for it here."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from tests.libraries import models
from tests.libraries.formers import models as formers

FORMERS = bool(formers.version())
LIBRARY = "paddleformers" if FORMERS else "paddlenlp"
#: What the library's trainer calls the number of stages.
STAGES = "pipeline_model_parallel_size" if FORMERS else "pipeline_parallel_degree"

class_of = formers.class_of if FORMERS else models.class_of


def module(name: str) -> Any:
    """Returns a module of the library."""
    return importlib.import_module(f"{LIBRARY}.{name}")


def configuration(model: str) -> Any:
    """Returns a new configuration of a model."""
    options = formers.MODELS[model][1] if FORMERS else models.MODELS[model].options
    return class_of(model, "Config")(**options)


def mask(rows: int) -> np.ndarray[Any, Any] | None:
    """Returns the mask that models need to be causal; None where they are without one."""
    return formers.causal_mask(rows) if FORMERS else None
