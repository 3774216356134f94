"""The names of the files in a folder of layers, and manifests that say which save they belong to.

Layer 3 is in ``layer_03-tensor_00-model_states.pdparams``; ``tensor_00`` is the tensor-parallel
shard. With several chunks on a rank it is ``layer_03-virtual_pp_stage_01-tensor_00-..``. Each rank
writes a manifest with the digests of its files. Before it replaces files of an older save it links
them, and the manifests that name them, below ``replaced``; the rank that completes the new save
removes these links. So whenever a rank is killed, one of the two saves is complete. A folder
without a manifest, such as Fleet writes, is read unchecked.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from fleetpipe.atomic_file import replacing
from fleetpipe.errors import CheckpointError, is_file_name
from fleetpipe.json_value import JsonValue, Source, read

_LAYER_NAME = re.compile(
    r"layer_(?P<number>\d{2,})(-virtual_pp_stage_(?P<chunk>\d{2,}))?"
    r"-tensor_(?P<shard>\d{2,})-model_states\.pdparams"
)

_NAME = re.compile(r"manifest-(\d{3,})\.json")
_PIECE = 1 << 20
#: Folder within the folder: it has a folder for each save whose files are being replaced.
_REPLACED = "replaced"
#: Number of writers in manifests of earlier versions, which do not have it.
_UNKNOWN = 1 << 30

_FIX = (
    "load another save; or, if the files were put there on purpose, remove manifest-*.json from "
    "the folder"
)

_SOURCE = Source("this is not the manifest of a rank's layers", CheckpointError, _FIX)


class LayerFile(NamedTuple):
    """The file of a layer.

    Attributes:
        number: The number of the layer in the whole list.
        chunk: The number of its chunk on its rank; None if each rank has one.
        shard: The tensor-parallel shard.
    """

    number: int
    chunk: int | None = None
    shard: int = 0

    @property
    def stem(self) -> str:
        """The begin of the file's name, which all shards have in common."""
        chunk = "" if self.chunk is None else f"-virtual_pp_stage_{self.chunk:02d}"
        return f"layer_{self.number:02d}{chunk}"

    @property
    def name(self) -> str:
        """The file's name."""
        return f"{self.stem}-tensor_{self.shard:02d}-model_states.pdparams"

    @classmethod
    def parse(cls, name: str) -> LayerFile | None:
        """Parses the name of a file; returns None if it is not the file of a layer."""
        match = _LAYER_NAME.fullmatch(name)
        if match is None:
            return None
        chunk = None if match["chunk"] is None else int(match["chunk"])
        return cls(int(match["number"]), chunk, int(match["shard"]))


class Writer(NamedTuple):
    """A rank that writes a part of a save.

    Attributes:
        save: The key of the save, the same on all ranks.
        number: The number of this rank among those that write layers.
        writers: The number of these ranks.
    """

    save: str
    number: int
    writers: int


class _Manifest(NamedTuple):
    """The manifest of one rank: its writer, its path, and a digest of each file by name."""

    writer: Writer
    path: Path
    digests: Mapping[str, str]


class LayerSave(NamedTuple):
    """The files of one save.

    Attributes:
        paths: The path of each file by its name.
        digests: The digests of those files that manifests name.
    """

    paths: Mapping[str, Path]
    digests: Mapping[str, str]

    def path(self, name: str) -> Path:
        """Returns the path of a file.

        Raises:
            CheckpointError: The file is missing.
        """
        path = self.paths[name]
        if not path.exists():
            raise CheckpointError(
                f"a file of the save is missing: {name}",
                where=str(path.parent),
                cause="it was removed, or is on the disk of another host",
                fix="put the file back, or load another save",
            )
        return path

    def require(self, name: str) -> None:
        """Compares a file with its digest, if a manifest has one.

        Raises:
            CheckpointError: The file belongs to another save.
        """
        path = self.paths[name]
        if name in self.digests and _digest(path) != self.digests[name]:
            raise _mixed_error(path.parent, f"{name} has another digest than its manifest")


def keep(folder: Path, writer: Writer, names: Collection[str]) -> None:
    """Links the files of older saves that a rank will replace, until the new save is complete.

    Args:
        folder: The folder of the files; if it does not exist there is nothing to link.
        writer: The rank.
        names: The files that it will replace.

    Raises:
        OSError: They cannot be linked.
    """
    if not folder.is_dir():
        return
    for manifest in _manifests(folder):
        number, save = manifest.writer.number, manifest.writer.save
        listed = [name for name in names if name in manifest.digests]
        goes = number == writer.number or number >= writer.writers
        if save != writer.save and (listed or goes):
            backup = _backup_folder(folder, save)
            backup.mkdir(parents=True, exist_ok=True)
            for name in (manifest.path.name, *listed):
                _link(folder / name, backup / name)


def write(folder: Path, writer: Writer, names: Iterable[str]) -> None:
    """Writes this rank's manifest; removes links to older saves once all ranks have written.

    Raises:
        OSError: It cannot be written.
    """
    files = {name: _digest(folder / name) for name in names}
    with replacing(folder) as draft:
        content = {"save": writer.save, "writers": writer.writers, "files": files}
        text = json.dumps(content, indent=1)
        (draft / f"manifest-{writer.number:03d}.json").write_text(text, encoding="utf-8")
    manifests = _manifests(folder)
    for manifest in manifests:
        if manifest.writer.number >= writer.writers:
            manifest.path.unlink(missing_ok=True)
    written = {one.writer.number for one in manifests if one.writer.save == writer.save}
    if written.issuperset(range(writer.writers)):
        # Not the links to this save, which a rank may make by now for its next save.
        for backup in {*(folder / _REPLACED).glob("*")} - {_backup_folder(folder, writer.save)}:
            shutil.rmtree(backup, ignore_errors=True)
        with suppress(OSError):
            (folder / _REPLACED).rmdir()


def save_in(folder: Path) -> LayerSave:
    """Returns the files of the newest complete save in a folder, and those without a manifest.

    Raises:
        CheckpointError: A manifest cannot be read, or no save is complete.
    """
    paths = {path.name: path for path in folder.iterdir() if path.is_file()}
    here = _manifests(folder)
    kept = [one for backup in (folder / _REPLACED).glob("*") for one in _manifests(backup)]
    saves: dict[str, dict[int, _Manifest]] = {}
    for manifest in (*here, *kept):
        saves.setdefault(manifest.writer.save, {}).setdefault(manifest.writer.number, manifest)
    if not saves:
        return LayerSave(paths, {})
    numbers = {one.writer.number for one in (*here, *kept)}
    whole = [
        (sum(one in here for one in parts.values()), save)
        for save, parts in saves.items()
        if parts.keys() >= {n for n in numbers if n < min(p.writer.writers for p in parts.values())}
    ]
    if not whole:
        first, other = (next(iter(parts.values())).path.name for parts in [*saves.values()][:2])
        raise _mixed_error(folder, f"{first} and {other} are of different saves")
    save = max(whole)[1]
    digests = {n: d for one in saves[save].values() for n, d in one.digests.items()}
    for name in digests:
        path = _backup_folder(folder, save) / name
        paths[name] = path if path.exists() else folder / name
    return LayerSave(paths, digests)


def _backup_folder(folder: Path, save: str) -> Path:
    return folder / _REPLACED / hashlib.sha256(save.encode()).hexdigest()[:16]


def _link(file: Path, kept: Path) -> None:
    """Links a file, or copies it if the disk has no links; an existing link stays."""
    with suppress(FileExistsError, FileNotFoundError):
        try:
            os.link(file, kept)
        except OSError:
            if not kept.exists():
                with replacing(kept.parent) as draft:
                    shutil.copy2(file, draft / kept.name)


def _mixed_error(folder: Path, how: str) -> CheckpointError:
    return CheckpointError(
        "the folder has layers of two saves",
        where=str(folder),
        got=how,
        cause="files were put there or removed by hand, or ranks saved to disks of their own",
        fix=_FIX,
    )


def _manifests(folder: Path) -> list[_Manifest]:
    matches = [(path, _NAME.fullmatch(path.name)) for path in sorted(folder.iterdir())]
    manifests = []
    for path, match in matches:
        if match:
            try:
                save, writers, digests = read(path, _SOURCE, _contents)
            except CheckpointError:
                if path.exists():
                    raise
                continue  # Another rank has removed it.
            manifests.append(_Manifest(Writer(save, int(match[1]), writers), path, digests))
    return manifests


def _contents(content: JsonValue) -> tuple[str, int, dict[str, str]]:
    files = {name: digest.text() for name, digest in content["files"].fields().items()}
    if not all(map(is_file_name, files)):
        raise content["files"].refused("names of files of the folder")
    writers = content["writers"].count() if "writers" in content.fields() else _UNKNOWN
    return content["save"].text(), writers, files


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()
