"""``fleetpipe new``: writes a project, ready to train, from the text files in this folder.

Their names end in ``.txt``, so that they are no modules of the package. No Paddle is needed.
"""

from __future__ import annotations

import argparse
import re
import reprlib
import sys
from pathlib import Path

from fleetpipe.arguments import using
from fleetpipe.errors import ConfigError

#: The placeholder for the project's name in the files.
_NAME_PLACEHOLDER = "PROJECT_NAME"
#: The files of a project, each with the file in this folder of which it is made.
_FILES = {
    "train.py": "train.py.txt",
    "config.yaml": "config.yaml.txt",
    "test_train.py": "test_train.py.txt",
    "Makefile": "Makefile.txt",
    "README.md": "README.md.txt",
    ".gitignore": "gitignore.txt",
}
_VALID_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,99}")
#: Names of packages, which a folder of that name would hide from Python.
_NAMES_OF_PACKAGES = ("fleetpipe", "paddle", "numpy")
#: What an empty folder may have in it: `git init` makes this.
_IGNORED = {".git"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``fleetpipe new`` to its parser."""
    parser.add_argument(
        "folder",
        type=_parse_folder,
        metavar="FOLDER",
        help="of the project, new or empty; its last part is the project's name",
    )


def run(options: argparse.Namespace) -> int:
    """Writes the project and prints the next steps.

    Raises:
        ConfigError: The name cannot be used, or the folder is not empty or cannot be written.
    """
    folder: Path = options.folder
    name = _require_new_project(folder)
    with using("FOLDER", folder, "a folder that can be written"):
        folder.mkdir(exist_ok=True)
        for target, source in _FILES.items():
            text = Path(__file__).with_name(source).read_text(encoding="utf-8")
            (folder / target).write_text(text.replace(_NAME_PLACEHOLDER, name), encoding="utf-8")
    sys.stdout.write(
        f"{folder}: {', '.join(_FILES)}\n"
        f"next: cd {folder} && pip install 'fleetpipe[project]' && python train.py\n"
    )
    return 0


def _parse_folder(text: str) -> Path:
    """Parses the argument FOLDER, which must not be blank."""
    if not text.strip():
        raise argparse.ArgumentTypeError("a project needs a name, such as my_project")
    return Path(text)


def _require_new_project(folder: Path) -> str:
    """Returns the name of the project that is to be written into a folder.

    Raises:
        ConfigError: The name cannot be used, or the folder is not empty or cannot be made.
    """
    name = folder.resolve().name
    if not _VALID_NAME.fullmatch(name) or name.lower() in _NAMES_OF_PACKAGES:
        raise ConfigError(
            f"{reprlib.repr(name)} cannot be the name of a project",
            expected="at most 100 letters, digits, - and _, a letter first, and no name of a "
            "package it needs",
            fix="fleetpipe new my_project",
        )
    if folder.is_dir() and {path.name for path in folder.iterdir()} - _IGNORED:
        raise ConfigError(
            "the folder is not empty: nothing was written",
            got=str(folder),
            fix="give a new name, or an empty folder",
        )
    if folder.exists() and not folder.is_dir():
        raise ConfigError("there is a file of that name", got=str(folder), fix="give a new name")
    if not folder.parent.is_dir():
        raise ConfigError(
            f"there is no folder {folder.parent}", fix="make it, or give a name alone"
        )
    return name
