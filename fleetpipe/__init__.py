"""Pipeline parallelism for PaddlePaddle: verified schedules, one engine, on CPUs as on GPUs.

``from fleetpipe import fleet`` is the drop-in face of ``paddle.distributed.fleet``.
``fleetpipe.schedules`` and ``fleetpipe.partition`` need no Paddle.
"""

from __future__ import annotations

import importlib
import os.path
import warnings
from typing import TYPE_CHECKING

from fleetpipe import contrib
from fleetpipe.extras import late
from fleetpipe.version import __version__ as __version__

# Paddle warns at every import if ccache is missing, which matters only for compiling.
warnings.filterwarnings("ignore", "No ccache found")

# In a checkout without symbolic links, dygraph/ and static/ are only beside this folder.
if not os.path.isdir(os.path.join(__path__[0], "dygraph")):
    __path__.append(os.path.dirname(__path__[0]))

contrib.install()

if TYPE_CHECKING:
    from fleetpipe import callbacks as callbacks
    from fleetpipe.capture.api import pipeline as pipeline
    from fleetpipe.capture.cutting.split_spec import SplitPoint as SplitPoint
    from fleetpipe.capture.explain import explain as explain
    from fleetpipe.capture.tracing.user_lines import pipe_split as pipe_split
    from fleetpipe.checkpoint.hashing import model_hash as model_hash
    from fleetpipe.checkpoint.manager import CheckpointManager as CheckpointManager
    from fleetpipe.checkpoint.restoring import load_single as load_single
    from fleetpipe.contrib.formats.convert import load_checkpoint as load_checkpoint
    from fleetpipe.contrib.generation import generate as generate
    from fleetpipe.contrib.locator.locate_command import locate as locate
    from fleetpipe.fit.model import Model as Model
    from fleetpipe.launch.resume import resume as resume
    from fleetpipe.profiling.planner import plan as plan

#: The module of each public name that is loaded when it is first used.
_LATE = {
    "CheckpointManager": "fleetpipe.checkpoint.manager",
    "Model": "fleetpipe.fit.model",
    "SplitPoint": "fleetpipe.capture.cutting.split_spec",
    "callbacks": "fleetpipe.callbacks",
    "explain": "fleetpipe.capture.explain",
    "generate": "fleetpipe.contrib.generation",
    "load_checkpoint": "fleetpipe.contrib.formats.convert",
    "load_single": "fleetpipe.checkpoint.restoring",
    "locate": "fleetpipe.contrib.locator.locate_command",
    "model_hash": "fleetpipe.checkpoint.hashing",
    "pipe_split": "fleetpipe.capture.tracing.user_lines",
    "pipeline": "fleetpipe.capture.api",
    "plan": "fleetpipe.profiling.planner",
    "resume": "fleetpipe.launch.resume",
}

__all__ = [
    "CheckpointManager",
    "Model",
    "SplitPoint",
    "__version__",
    "callbacks",
    "explain",
    "generate",
    "install",
    "load_checkpoint",
    "load_single",
    "locate",
    "model_hash",
    "pipe_split",
    "pipeline",
    "plan",
    "resume",
]


def __dir__() -> list[str]:
    """Returns the public names, including those that are not loaded yet."""
    return __all__


if not TYPE_CHECKING:  # to a type checker it would give the module every name
    __getattr__ = late(_LATE)


def install() -> None:
    """Replaces ``paddle.distributed.fleet`` by fleetpipe for all later imports.

    ``fleetpipe run`` does the same. Call it at the top of a script, above the import of a library
    that is built on Fleet. This call imports Paddle, ``import fleetpipe`` does not.

    Raises:
        ConfigError: It is too late: a module has imported Paddle's classes before.
    """
    importlib.import_module("fleetpipe.launch.substitution").install()
