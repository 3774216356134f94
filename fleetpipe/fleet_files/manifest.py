"""Names the files in a folder of layers, and records in manifests which save each belongs to.

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

#: The name of the manifest of a rank, with the rank's number among those that write layers.
_MANIFEST_NAME = re.compile(r"manifest-(\d{3,})\.json")
_BLOCK_BYTES = 1 << 20
#: The subfolder that has a folder for each save whose files are being replaced.
_REPLACED = "replaced"
#: The number of writers for manifests of earlier versions, which do not say it.
_UNKNOWN_WRITERS = 1 << 30

_FIX = (
    "load another save; or, if the files were put there on purpose, remove manifest-*.json from "
    "the folder"
)

_SOURCE = Source("this is not the manifest of a rank's layers", CheckpointError, _FIX)


class LayerFile(NamedTuple):
    """The file of a layer, or of one tensor-parallel shard of it.

    Attributes:
        number: The number of the layer in the list of all layers of the model.
        chunk: The number of the layer's chunk on its rank; None if each rank has one chunk.
        shard: The number of the tensor-parallel shard.
    """

    number: int
    chunk: int | None = None
    shard: int = 0

    @property
    def stem(self) -> str:
        """The begin of the file's name, which is the same for all shards of the layer."""
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
    """A rank that writes files of a save.

    Attributes:
        save: The key of the save, the same on all ranks.
        number: The number of this rank among those that write layers.
        writers: The number of the ranks that write layers.
    """

    save: str
    number: int
    writers: int


class _Manifest(NamedTuple):
    """The manifest of one rank.

    Attributes:
        writer: The rank that wrote it, and the save to which it belongs.
        path: The path of the manifest.
        digests: The digest of each file that the rank wrote, by name.
    """

    writer: Writer
    path: Path
    digests: Mapping[str, str]


class LayerSave(NamedTuple):
    """The files of one save.

    Attributes:
        paths: The path of each file by name; files that no manifest names are included.
        digests: The digest of each file that a manifest names, by name.
    """

    paths: Mapping[str, Path]
    digests: Mapping[str, str]

    def path(self, name: str) -> Path:
        """Returns the path of a file of the save.

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
        """Compares a file with its digest; does nothing for a file that no manifest names.

        Raises:
            CheckpointError: The file belongs to another save.
        """
        path = self.paths[name]
        if name in self.digests and _digest(path) != self.digests[name]:
            raise _mixed_error(path.parent, f"{name} has another digest than its manifest")


def link_replaced_files(folder: Path, writer: Writer, names: Collection[str]) -> None:
    """Links the files of older saves that a rank will replace into the backup folders.

    The links keep the older save complete until :func:`write` removes the links. The manifests that
    the rank will replace, and those that no rank of the new save has, are linked too.

    Args:
        folder: The folder of the files; if it does not exist there is nothing to link.
        writer: The rank.
        names: The names of the files that the rank will replace.

    Raises:
        OSError: A file cannot be linked.
    """
    if not folder.is_dir():
        return
    for manifest in _read_manifests(folder):
        number, save = manifest.writer.number, manifest.writer.save
        listed = [name for name in names if name in manifest.digests]
        is_replaced = number == writer.number or number >= writer.writers
        if save != writer.save and (listed or is_replaced):
            backup = _backup_folder(folder, save)
            backup.mkdir(parents=True, exist_ok=True)
            for name in (manifest.path.name, *listed):
                _link_or_copy(folder / name, backup / name)


def write(folder: Path, writer: Writer, names: Iterable[str]) -> None:
    """Writes a rank's manifest, and removes links to older saves if it completes the new save.

    Args:
        folder: The folder of the files.
        writer: The rank.
        names: The names of the files that the rank has written.

    Raises:
        OSError: The manifest cannot be written.
    """
    files = {name: _digest(folder / name) for name in names}
    with replacing(folder) as draft:
        content = {"save": writer.save, "writers": writer.writers, "files": files}
        text = json.dumps(content, indent=1)
        (draft / f"manifest-{writer.number:03d}.json").write_text(text, encoding="utf-8")
    manifests = _read_manifests(folder)
    for manifest in manifests:
        if manifest.writer.number >= writer.writers:
            manifest.path.unlink(missing_ok=True)
    of_save = [manifest for manifest in manifests if manifest.writer.save == writer.save]
    if {manifest.writer.number for manifest in of_save}.issuperset(range(writer.writers)):
        # Not the links to this save, which a rank may make by now for its next save.
        for backup in {*(folder / _REPLACED).glob("*")} - {_backup_folder(folder, writer.save)}:
            shutil.rmtree(backup, ignore_errors=True)
        with suppress(OSError):
            (folder / _REPLACED).rmdir()


def newest_save_in(folder: Path) -> LayerSave:
    """Returns the files of the newest complete save in a folder, and those without a manifest.

    Raises:
        CheckpointError: A manifest cannot be read, or no save is complete.
    """
    paths = {path.name: path for path in folder.iterdir() if path.is_file()}
    current = _read_manifests(folder)
    linked = [m for backup in (folder / _REPLACED).glob("*") for m in _read_manifests(backup)]
    saves: dict[str, dict[int, _Manifest]] = {}
    for manifest in (*current, *linked):
        saves.setdefault(manifest.writer.save, {}).setdefault(manifest.writer.number, manifest)
    if not saves:
        return LayerSave(paths, {})
    numbers = {manifest.writer.number for manifest in (*current, *linked)}
    complete = []
    for save, manifests in saves.items():
        writers = min(manifest.writer.writers for manifest in manifests.values())
        if manifests.keys() >= {number for number in numbers if number < writers}:
            complete.append((sum(m in current for m in manifests.values()), save))
    if not complete:
        first, second, *_ = saves.values()
        names = (next(iter(manifests.values())).path.name for manifests in (first, second))
        raise _mixed_error(folder, "{} and {} are of different saves".format(*names))
    # The newest save is the one of which the fewest manifests were replaced.
    _, save = max(complete)
    digests: dict[str, str] = {}
    for manifest in saves[save].values():
        digests.update(manifest.digests)
    for name in digests:
        path = _backup_folder(folder, save) / name
        paths[name] = path if path.exists() else folder / name
    return LayerSave(paths, digests)


def _backup_folder(folder: Path, save: str) -> Path:
    """Returns the folder for links to the files of a save that are being replaced."""
    return folder / _REPLACED / hashlib.sha256(save.encode()).hexdigest()[:16]


def _link_or_copy(file: Path, link: Path) -> None:
    """Makes a link to a file, or a copy if the disk has no links; an existing link stays."""
    with suppress(FileExistsError, FileNotFoundError):
        try:
            os.link(file, link)
        except OSError:
            if not link.exists():
                with replacing(link.parent) as draft:
                    shutil.copy2(file, draft / link.name)


def _mixed_error(folder: Path, got: str) -> CheckpointError:
    """Returns the error for a folder without a complete save; ``got`` says what it has instead."""
    return CheckpointError(
        "the folder has layers of two saves",
        where=str(folder),
        got=got,
        cause="files were put there or removed by hand, or ranks saved to disks of their own",
        fix=_FIX,
    )


def _read_manifests(folder: Path) -> list[_Manifest]:
    """Reads the manifests in a folder, in the order of their names.

    Raises:
        CheckpointError: A manifest cannot be read.
    """
    matches = [(path, _MANIFEST_NAME.fullmatch(path.name)) for path in sorted(folder.iterdir())]
    manifests = []
    for path, match in matches:
        if match:
            try:
                save, writers, digests = read(path, _SOURCE, _parse_contents)
            except CheckpointError:
                if path.exists():
                    raise
                continue  # Another rank has removed it.
            manifests.append(_Manifest(Writer(save, int(match[1]), writers), path, digests))
    return manifests


def _parse_contents(content: JsonValue) -> tuple[str, int, dict[str, str]]:
    """Returns the key of the save, the number of writers, and the digest of each file by name.

    ``content`` is the parsed JSON of a manifest.
    """
    files = {name: digest.text() for name, digest in content["files"].fields().items()}
    if not all(map(is_file_name, files)):
        raise content["files"].refused("names of files of the folder")
    writers = content["writers"].count() if "writers" in content.fields() else _UNKNOWN_WRITERS
    return content["save"].text(), writers, files


def _digest(path: Path) -> str:
    """Returns the SHA-256 of a file as hex digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
