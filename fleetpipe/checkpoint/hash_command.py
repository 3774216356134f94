"""The command ``fleetpipe hash``: prints a hash for each model, and which models are the same.

It loads Paddle only for files that Paddle or another program has written.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fleetpipe.arguments import using
from fleetpipe.checkpoint.checkpoint_commands import FORMATS, print_escaped
from fleetpipe.checkpoint.contents.parts import MODEL
from fleetpipe.checkpoint.files import run_folder, tensors
from fleetpipe.checkpoint.files.manifest import StepReader, hash_lines, hash_of, tensor_digest
from fleetpipe.errors import CheckpointError
from fleetpipe.extras import extra

#: The end of the name of one of several files of a model.
_SHARDED_FILE = re.compile(r"-\d{5}-of-(\d{5})\.safetensors")


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``fleetpipe hash`` to its parser."""
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="CHECKPOINT|FILE",
        help="the folder of a run, of which the newest step counts, of a step, or of a checkpoint "
        "that fleetpipe checkpoint convert reads; a file of paddle.save, or of safetensors",
    )
    parser.add_argument(
        "--by-name",
        action="store_true",
        help="print also, above the hash, the digest of every tensor, of which it is made",
    )
    parser.add_argument(
        "--from",
        dest="source_format",
        choices=FORMATS,
        help="the format of folders; by default it is recognized by its files",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints a line for each model as ``sha256sum`` does, and then which models are the same.

    Raises:
        CheckpointError: A path has no model, or it is damaged.
        ConfigError: A file cannot be read.
    """
    models: list[tuple[str, Mapping[str, str]]] = []
    for path in arguments.paths:
        digests = digests_in(Path(path), arguments.source_format)
        if arguments.by_name:
            print_escaped("\n".join(hash_lines(digests)))
        print_escaped(f"{hash_of(digests)}  {path}")
        models.append((path, digests))
    for number, (path, digests_of_model) in enumerate(models[1:], 1):
        print_escaped(f"{path}: {_compare_with_earlier(digests_of_model, models[:number])}")
    return 0


def _compare_with_earlier(
    digests: Mapping[str, str], earlier: Sequence[tuple[str, Mapping[str, str]]]
) -> str:
    """Returns a text: which earlier model this model equals, or how it differs from the first.

    Args:
        digests: The digest of each tensor of the model.
        earlier: The path of each earlier model, and the digest of each of its tensors.
    """
    for path, earlier_digests in earlier:
        if digests == earlier_digests:
            return f"the same model as {path}"
    for path, earlier_digests in earlier:
        if {*digests.values()} == {*earlier_digests.values()}:
            return f"the same values as {path}, under other names"
    path, first_digests = earlier[0]
    all_names = {**first_digests, **digests}
    differing = [name for name in all_names if digests.get(name) != first_digests.get(name)]
    both_have = differing[0] in digests and differing[0] in first_digests
    how = "differs first" if both_have else "is in one of them alone"
    count = f"{len(differing)} of {len(all_names)} tensors"
    return f"not the model of {path}: {differing[0]!r} {how}, {count}"


def digests_in(path: Path, source_format: str | None = None) -> dict[str, str]:
    """Returns the digest of each tensor of a model by name, in the order of the file.

    Args:
        path: A file, or the folder of a checkpoint.
        source_format: The format of a folder; None recognizes it by its files.

    Raises:
        CheckpointError: The path has no model, or it is damaged.
        ConfigError: A file cannot be read.
    """
    if not path.exists():  # nor does a path with a NUL in it
        raise CheckpointError(
            "there is no such file or folder", where=str(path), fix="check the path"
        )
    if path.is_dir():
        digests = _digests_in_folder(path, source_format)
    elif path.suffix == ".safetensors":
        part = _SHARDED_FILE.search(path.name)
        if part is not None and int(part[1]) > 1:
            raise CheckpointError(
                f"{path.name} is one of {int(part[1])} parts of a model",
                where=str(path),
                fix="pass the folder of all parts and their index",
            )
        digests = _digests_in_file(path)
    else:
        digests = _digests_of_checkpoint(extra("formats.model_files").read_state_dict(path))
    strange = [name for name in digests if not name.isprintable()]
    if strange or not digests:
        raise CheckpointError(
            f"{path.name} holds no model",
            where=str(path),
            got=f"a tensor named {strange[0]!r}" if strange else "no tensor",
            fix="pass a checkpoint, or a file of a model's state_dict()",
        )
    return digests


def _digests_in_folder(path: Path, source_format: str | None) -> dict[str, str]:
    """Returns the digest of each tensor of the model in the folder of a checkpoint, by name.

    ``source_format`` is the format of the folder; None recognizes it by its files.
    """
    if source_format in (None, "fleetpipe") and run_folder.is_checkpoint(path):
        reader = StepReader(run_folder.find_step(path))
        reader.check((MODEL,))
        entries = reader.manifest.tensors.items()
        files = {entry.file for name, entry in entries if name.group == MODEL}
        digests = {
            n: d for file in files for n, d in _digests_in_file(reader.folder / file).items()
        }
        return {name: digests[name] for name in reader.manifest.order}
    formats = extra("formats.convert")
    return _digests_of_checkpoint(
        formats.read_checkpoint(path, source_format or formats.format_of(path))
    )


def _digests_of_checkpoint(checkpoint: Any) -> dict[str, str]:
    """Returns the digest of each tensor of the model in a checkpoint, by name.

    ``checkpoint`` is one that ``contrib.formats`` has opened.
    """
    return {name: tensor.digest() for name, tensor in checkpoint.of(MODEL).items()}


def _digests_in_file(path: Path) -> dict[str, str]:
    """Returns the digest of each tensor in a safetensors file by name; reads block by block."""
    with using("CHECKPOINT|FILE", path, "a file that can be read"):
        layout = tensors.read_layout(path)
        with path.open("rb", buffering=0) as file:
            return {
                name: tensor_digest(stored.tensor, tensors.blocks(file, stored))
                for name, stored in layout.tensors.items()
            }
