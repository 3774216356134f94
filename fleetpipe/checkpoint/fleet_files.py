"""The older import path of :mod:`fleetpipe.fleet_files`."""

from fleetpipe.fleet_files import arrays, counted_names, load, save, save_all

__all__ = ["arrays", "counted_names", "load", "save", "save_all"]
