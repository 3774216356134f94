"""Of which save the files in a folder of layers are: a digest of each, by the rank that wrote it.

A rank replaces its files, and then its own manifest. Where one is killed on the way the digests are
not those of the files, or the ranks' manifests are of two saves. A folder without a manifest, such
as Fleet writes, is taken as it is.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from fleetpipe.atomic_file import replacing
from fleetpipe.errors import CheckpointError
from fleetpipe.json_value import JsonValue, Source, read

_NAME = re.compile(r"manifest-(\d{3,})\.json")
_PIECE = 1 << 20


class Writer(NamedTuple):
    """Who writes a part of a save.

    Attributes:
        save: Names the save, on all ranks alike.
        number: Of this rank among those that write layers.
        writers: The number of these.
    """

    save: str
    number: int
    writers: int


def write(folder: Path, writer: Writer, names: Iterable[str]) -> None:
    """Says what this rank has written; removes what more ranks than now said of an older save.

    Raises:
        OSError: It cannot be written.
    """
    files = {name: _digest(folder / name) for name in names}
    with replacing(folder) as draft:
        text = json.dumps({"save": writer.save, "files": files}, indent=1)
        (draft / f"manifest-{writer.number:03d}.json").write_text(text, encoding="utf-8")
    for number, path in _manifests(folder).items():
        if number >= writer.writers:
            path.unlink(missing_ok=True)


def digests_of_one_save(folder: Path) -> dict[str, str]:
    """Returns the digest of each file that a manifest in the folder names.

    Raises:
        CheckpointError: A manifest cannot be read, or two are of different saves.
    """
    digests: dict[str, str] = {}
    saves: dict[str, str] = {}
    for _, path in sorted(_manifests(folder).items()):
        save, files = read(path, _SOURCE, _contents)
        other = saves.setdefault(save, path.name)
        digests.update(files)
        if len(saves) > 1:
            first = next(iter(saves.values()))
            raise _mixed(folder, f"{first} and {other} are of different saves")
    return digests


def _contents(content: JsonValue) -> tuple[str, dict[str, str]]:
    files = {name: digest.text() for name, digest in content["files"].fields().items()}
    return content["save"].text(), files


def require(path: Path, digests: Mapping[str, str]) -> None:
    """Compares a file with the digest that stands in its folder, if one does.

    Raises:
        CheckpointError: It is of another save.
    """
    if path.name in digests and _digest(path) != digests[path.name]:
        raise _mixed(path.parent, f"{path.name} has another digest than its manifest")


_FIX = (
    "load another save; or, if the files were put there on purpose, remove manifest-*.json from "
    "the folder"
)

_SOURCE = Source("this is not the manifest of a rank's layers", CheckpointError, _FIX)


def _mixed(folder: Path, how: str) -> CheckpointError:
    return CheckpointError(
        "the folder has layers of two saves",
        where=str(folder),
        got=how,
        cause="a rank was killed while save_state_dict replaced the files of an older save",
        fix=_FIX,
    )


def _manifests(folder: Path) -> dict[int, Path]:
    matches = {path: _NAME.fullmatch(path.name) for path in folder.iterdir()}
    return {int(match[1]): path for path, match in matches.items() if match}


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()
