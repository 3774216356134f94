"""The extras: features that a pipeline does not need, in a package each, with a README.

They import the core and the standard ring; nothing there imports them. Tables (of commands, of
callbacks, of observers) name them as text and load them when they are used.

Users import an extra by the shorter path of ``SHORTER``: ``fleetpipe.ray`` is
``fleetpipe.contrib.ray``.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec

from fleetpipe.extras import Finder, spec_of

#: The paths by which users import packages and modules of this package.
SHORTER = {
    "fleetpipe.checkpoint.formats": "formats",
    "fleetpipe.compat": "compat",
    "fleetpipe.doctor": "doctor",
    "fleetpipe.dygraph.experts": "experts",
    "fleetpipe.dygraph.sequences": "sequences",
    "fleetpipe.dygraph.slices": "slices",
    "fleetpipe.dygraph.vocabulary": "vocabulary",
    "fleetpipe.fit.callbacks.log_by_epoch": "callbacks",
    "fleetpipe.fit.callbacks.loss_monitor": "callbacks",
    "fleetpipe.locator": "locator",
    "fleetpipe.lora": "lora",
    "fleetpipe.profiling.clusters": "clusters",
    "fleetpipe.ray": "ray",
    "fleetpipe.report": "view",
    "fleetpipe.schedules.forms.panel": "pictures",
    "fleetpipe.schedules.forms.picture": "pictures.picture",
    "fleetpipe.starter": "starter",
    "fleetpipe.watch": "view",
    "fleetpipe.why": "view",
}


def _find(fullname: str) -> ModuleSpec | None:
    """Finds a module that is imported by a shorter path, or is below one.

    Without it the path finder would find the modules below in the package's ``__path__``, and load
    them a second time.
    """
    for shorter, extra in SHORTER.items():
        if f"{fullname}.".startswith(f"{shorter}."):
            name = f"{__name__}.{extra}{fullname.removeprefix(shorter)}"
            spec = spec_of(fullname, name)
            # A later import of a loaded module would replace the package's attribute of its name.
            for loaded in [module for module in sys.modules if module.startswith(f"{name}.")]:
                shorter_name = fullname + loaded.removeprefix(name)
                sys.modules.setdefault(shorter_name, sys.modules[loaded])
            return spec
    return None


def install() -> None:
    """Lets ``import`` find extras by the paths of ``SHORTER``; a second call does nothing."""
    Finder(_find).install()
