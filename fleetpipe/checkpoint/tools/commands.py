"""The command ``fleetpipe checkpoint``: looks at the folder of a run, and makes other files of it.

Only what reads or writes Paddle's own files loads Paddle.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fleetpipe.arguments import new_file
from fleetpipe.checkpoint.contents.parts import GROUPS, MODEL
from fleetpipe.checkpoint.files import manifest, run_folder
from fleetpipe.checkpoint.files.reader import StepReader
from fleetpipe.checkpoint.files.run_folder import LATEST, Retention
from fleetpipe.checkpoint.tools.differences import differences
from fleetpipe.checkpoint.tools.merging import merge
from fleetpipe.errors import CheckpointError, ConfigError, printable

#: Shown however many ways they are split; the others where they are.
_USUAL_AXES = ("dp", "mp", "pp", "sharding")
#: Those of fleetpipe.checkpoint.formats.convert, which loads Paddle.
_FORMATS = ("fleetpipe", "fleet", "formers", "distributed", "unified", "huggingface")
_UNITS = ("B", "KB", "MB", "GB", "TB")


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``fleetpipe checkpoint`` to its parser."""
    parser.add_argument(
        "action",
        choices=list(_ACTIONS),
        help="list, or ls: the steps of a run; show: what a step holds; verify: compare with the "
        "checksums; diff: the first tensor of which two steps have other bits; merge: the model in "
        "one file; convert: a checkpoint of any format to any other",
    )
    parser.add_argument(
        "path",
        type=Path,
        help="the folder of a run, or of one of its steps; convert: that of any checkpoint",
    )
    parser.add_argument(
        "other",
        type=Path,
        nargs="?",
        help="diff: the other run or step; merge: a new .safetensors or .pdparams file; "
        "convert: the folder to write, a new one or that of a run",
    )
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="which step of a run, by default the newest; convert: that of the run to write",
    )
    parser.add_argument(
        "--to",
        choices=_FORMATS,
        help="convert: the format to write; by default fleetpipe, of a run of fleetpipe's fleet",
    )
    parser.add_argument(
        "--from",
        dest="source_format",
        choices=_FORMATS,
        help="convert: the format of what is read; by default it is recognized by its files",
    )
    parser.add_argument(
        "--names",
        metavar="MAP",
        help="convert: other names for the tensors: a file of JSON with Paddle's aoa_statements, "
        "or one of fleetpipe's, such as paddlenlp-llama, from Hugging Face's names",
    )
    parser.add_argument(
        "--reverse-names", action="store_true", help="convert: reads the map from right to left"
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs ``fleetpipe checkpoint``.

    Returns:
        0; 1 where ``verify`` finds damage or ``diff`` a difference.

    Raises:
        CheckpointError: There is no such step, or it cannot be read.
        ConfigError: An argument is missing, or one too many.
    """
    action = _ACTIONS[arguments.action]
    if (arguments.other is None) != (arguments.action in _ALONE):
        missing = "needs a second path" if arguments.other is None else "takes one path"
        raise ConfigError(
            f"fleetpipe checkpoint {arguments.action} {missing}",
            fix="fleetpipe checkpoint --help says what it is",
        )
    return action(arguments)


def _list(arguments: argparse.Namespace) -> int:
    steps = run_folder.complete_steps(arguments.path)
    if not steps:
        raise CheckpointError(
            "there is no checkpoint in this folder",
            where=str(arguments.path),
            fix="pass the folder that CheckpointManager was given",
        )
    for step, folder in steps.items():
        try:
            contents = manifest.read(folder)
        except CheckpointError as error:
            _say(f"{step:>10}  damaged: {str(error).splitlines()[0]}")
            continue
        size = sum(whole.size for whole in contents.files.values())
        metrics = "  ".join(f"{name}={value:g}" for name, value in contents.metrics.items())
        _say(
            f"{step:>10}  {_size(size):>9}  {len(contents.tensors):>6} tensors  {metrics}".rstrip()
        )
    for step, folder in run_folder.aside_steps(arguments.path).items():
        _say(f"{step:>10}  set aside: the run went back before it; {folder.name}")
    return 0


def _show(arguments: argparse.Namespace) -> int:
    reader = manifest.read(_folder(arguments.path, arguments.step))
    _say(f"step       {reader.step}")
    _say(f"written by {_listed(reader.versions)}")
    layout = {axis: n for axis, n in reader.layout.items() if n > 1 or axis in _USUAL_AXES}
    _say(f"layout     {_listed(layout)} (any other reads it)")
    _say(f"optimizer  {reader.optimizer or 'none'}")
    if reader.metrics:
        _say(f"metrics    {_listed(reader.metrics)}")
    for group in GROUPS:
        entries = {n.name: e for n, e in reader.tensors.items() if n.group == group}
        if entries:
            size = sum(entry.tensor.nbytes for entry in entries.values())
            _say(f"{group}: {len(entries)} tensors, {_size(size)}")
        for name, entry in entries.items():
            _say(f"  {name:40} {entry.tensor.dtype:8} {list(entry.tensor.shape)}")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    if arguments.step is None and not _is_step(arguments.path):
        folders = [*run_folder.complete_steps(arguments.path).values()]
        folders = folders or [_folder(arguments.path, None)]
    else:
        folders = [_folder(arguments.path, arguments.step)]
    worst = 0
    for folder in folders:
        errors = list(_damage(folder))
        for error in errors:
            _say(error)
        _say(f"{folder.name}: {'damaged' if errors else 'whole'}")
        worst = max(worst, int(bool(errors)))
    return worst


def _damage(folder: Path) -> Iterator[CheckpointError]:
    try:
        reader = StepReader(folder)
        reader.check_texts()
        yield from reader.damaged()
    except CheckpointError as error:
        yield error


def _diff(arguments: argparse.Namespace) -> int:
    paths = (arguments.path, arguments.other)
    readers = [StepReader(_folder(path, arguments.step)) for path in paths]
    lines = differences(*readers)
    _say("\n".join(lines) if lines else "all tensors have the same bits")
    return int(bool(lines))


def _merge(arguments: argparse.Namespace) -> int:
    target = new_file(str(arguments.other))
    if target.suffix not in (".safetensors", ".pdparams"):
        raise ConfigError(
            f"merge writes a .safetensors or a .pdparams file (={target.name})",
            fix="give the file one of these endings",
        )
    reader = _model_of(arguments)
    if target.suffix == ".safetensors":
        merge(reader, target)
    else:
        _converting().write_parameters(reader.folder, target)
    _say(f"{reader.folder.name}: {_size(target.stat().st_size)} in {target}")
    return 0


def _convert(arguments: argparse.Namespace) -> int:
    converting = _converting()
    names = None
    if arguments.names is not None:
        names = converting.read_map(arguments.names, reverse=arguments.reverse_names)
    try:
        written = converting.convert(
            arguments.path,
            arguments.other,
            to=arguments.to,
            source_format=arguments.source_format,
            names=names,
            step=arguments.step,
        )
    except OSError as error:
        raise CheckpointError(
            "the conversion did not end, and nothing of it is left",
            where=str(arguments.other),
            got=str(error),
            fix="make room, or choose a folder in which files can be made",
        ) from error
    _say(written)
    return 0


_ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {
    "list": _list,
    "ls": _list,
    "show": _show,
    "verify": _verify,
    "diff": _diff,
    "merge": _merge,
    "convert": _convert,
}
_ALONE = ("list", "ls", "show", "verify")


def _converting() -> Any:
    """Returns the module that loads Paddle."""
    return importlib.import_module("fleetpipe.checkpoint.formats.convert")


def _is_step(path: Path) -> bool:
    return (path / manifest.MANIFEST).is_file()


def _folder(path: Path, step: int | None) -> Path:
    """Returns the folder of a step: itself, or that of a run."""
    if step is None and _is_step(path):
        return path
    return Retention(path).chosen(LATEST if step is None else step)


def _model_of(arguments: argparse.Namespace) -> StepReader:
    """Returns a step of which the model has been compared with its checksums."""
    reader = StepReader(_folder(arguments.path, arguments.step))
    reader.check((MODEL,))
    return reader


def _listed(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _size(count: float) -> str:
    for unit in _UNITS[:-1]:
        if count < 1000:
            return f"{count:.3g} {unit}" if unit != "B" else f"{count} B"
        count /= 1000
    return f"{count:.3g} {_UNITS[-1]}"


def _say(text: object) -> None:
    """Prints what may have names of a file in it."""
    print(printable(str(text)))
