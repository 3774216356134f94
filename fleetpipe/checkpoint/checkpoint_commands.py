"""The command ``fleetpipe checkpoint``: shows, compares and converts checkpoints.

It loads Paddle only to read or write Paddle's own files.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fleetpipe.arguments import new_file
from fleetpipe.atomic_file import replacing
from fleetpipe.checkpoint.contents.parts import GROUPS, MODEL, TensorName
from fleetpipe.checkpoint.files import manifest, run_folder, tensors
from fleetpipe.checkpoint.files.manifest import SHORT, StepReader
from fleetpipe.checkpoint.files.tensors import CODES
from fleetpipe.errors import CheckpointError, ConfigError, printable
from fleetpipe.mesh.parts import Described

#: Axes that are always shown; the others only if they have several ranks.
_USUAL_AXES = ("dp", "mp", "pp", "sharding")
#: The formats of fleetpipe.contrib.formats.convert, repeated here since it loads Paddle.
FORMATS = ("fleetpipe", "fleet", "formers", "distributed", "unified", "huggingface", "pretrained")
_UNITS = ("B", "KB", "MB", "GB", "TB")

#: The actions that take one path; others take two.
_WITHOUT_OTHER = ("list", "ls", "show", "verify")

#: The most names of tensors that ``diff`` shows of those that only one step has.
_MOST_SHOWN = 5


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
        choices=FORMATS,
        help="convert: the format to write; by default fleetpipe, of a run of fleetpipe's fleet",
    )
    parser.add_argument(
        "--from",
        dest="source_format",
        choices=FORMATS,
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
        0; 1 if ``verify`` finds damage or ``diff`` a difference.

    Raises:
        CheckpointError: There is no such step, or it cannot be read.
        ConfigError: An argument is missing, or there is one too many.
    """
    action = _ACTIONS[arguments.action]
    if (arguments.other is None) != (arguments.action in _WITHOUT_OTHER):
        missing = "needs a second path" if arguments.other is None else "takes one path"
        raise ConfigError(
            f"fleetpipe checkpoint {arguments.action} {missing}",
            fix="fleetpipe checkpoint --help says what it is",
        )
    return action(arguments)


def _list(arguments: argparse.Namespace) -> int:
    """Prints a line for each step of a run, and for each step that was set aside."""
    steps = run_folder.complete_steps(arguments.path)
    if not steps:
        raise CheckpointError(
            "there is no checkpoint in this folder",
            where=str(arguments.path),
            fix="pass the folder that CheckpointManager was given",
        )
    for step, folder in steps.items():
        try:
            contents = manifest.read_manifest(folder)
        except CheckpointError as error:
            print_escaped(f"{step:>10}  damaged: {str(error).splitlines()[0]}")
            continue
        size = sum(summary.size for summary in contents.files.values())
        metrics = "  ".join(f"{name}={value:g}" for name, value in contents.metrics.items())
        of_model = f"{len(contents.tensors):>6} tensors  {contents.model_hash[:SHORT]:{SHORT}}"
        print_escaped(f"{step:>10}  {_size_text(size):>9}  {of_model}  {metrics}".rstrip())
    for step, folder in run_folder.aside_steps(arguments.path):
        print_escaped(f"{step:>10}  set aside: the run went back before it; {folder.name}")
    return 0


def _show(arguments: argparse.Namespace) -> int:
    """Prints what the manifest of a step says."""
    reader = manifest.read_manifest(run_folder.find_step(arguments.path, arguments.step))
    print_escaped(f"step       {reader.step}")
    print_escaped(f"written by {_pairs_text(reader.versions)}")
    layout = {axis: n for axis, n in reader.layout.items() if n > 1 or axis in _USUAL_AXES}
    print_escaped(f"layout     {_pairs_text(layout)} (any other reads it)")
    print_escaped(f"optimizer  {reader.optimizer or 'none'}")
    print_escaped(f"hash       {reader.model_hash or 'none: fleetpipe hash computes it'}")
    if reader.metrics:
        print_escaped(f"metrics    {_pairs_text(reader.metrics)}")
    for group in GROUPS:
        entries = {n.name: e for n, e in reader.tensors.items() if n.group == group}
        if entries:
            size = sum(entry.tensor.nbytes for entry in entries.values())
            print_escaped(f"{group}: {len(entries)} tensors, {_size_text(size)}")
        for name, entry in entries.items():
            print_escaped(f"  {name:40} {entry.tensor.dtype:8} {list(entry.tensor.shape)}")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    """Compares the files of a step, or of all steps of a run, with their checksums.

    Returns 1 if any step is damaged, else 0. Steps that a job removes meanwhile do not count.
    """
    if arguments.step is None and not (arguments.path / manifest.MANIFEST).is_file():
        folders = [*run_folder.complete_steps(arguments.path).values()]
        folders = folders or [run_folder.find_step(arguments.path, None)]
    else:
        folders = [run_folder.find_step(arguments.path, arguments.step)]
    worst = 0
    for folder in folders:
        inode_before, model_hash = _inode_of(folder), ""
        try:
            reader = StepReader(folder)
            reader.check_texts()
            errors = reader.find_damage()
            model_hash = f", {reader.manifest.model_hash[:SHORT]}".removesuffix(", ")
        except CheckpointError as error:
            errors = [error]
        if errors and _inode_of(folder) != inode_before:
            print_escaped(
                f"{folder.name}: removed or replaced meanwhile, as a job does that saves here"
            )
            continue
        for damage in errors:
            print_escaped(damage)
        print_escaped(f"{folder.name}: {'damaged' if errors else f'whole{model_hash}'}")
        worst = max(worst, int(bool(errors)))
    return worst


def _inode_of(folder: Path) -> int:
    """Returns the inode of a folder, which changes if it is replaced; 0 if it does not exist."""
    return folder.stat().st_ino if folder.is_dir() else 0


def _diff(arguments: argparse.Namespace) -> int:
    """Prints the differences of two steps; returns 1 if there are any, else 0."""
    paths = (arguments.path, arguments.other)
    readers = [StepReader(run_folder.find_step(path, arguments.step)) for path in paths]
    lines = differences(*readers)
    print_escaped("\n".join(lines) if lines else "all tensors have the same bits")
    return int(bool(lines))


def _merge(arguments: argparse.Namespace) -> int:
    """Writes the model of a step into one file, of the format that the file's ending says."""
    target = new_file(str(arguments.other))
    if target.suffix not in (".safetensors", ".pdparams"):
        raise ConfigError(
            f"merge writes a .safetensors or a .pdparams file (={target.name})",
            fix="give the file one of these endings",
        )
    reader = StepReader(run_folder.find_step(arguments.path, arguments.step))
    reader.check((MODEL,))
    if target.suffix == ".safetensors":
        merge(reader, target)
    else:
        _convert_module().write_parameters(reader.folder, target)
    print_escaped(f"{reader.folder.name}: {_size_text(target.stat().st_size)} in {target}")
    return 0


def _convert(arguments: argparse.Namespace) -> int:
    """Converts a checkpoint of any format to another format."""
    converting = _convert_module()
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
    print_escaped(written)
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


def _convert_module() -> Any:
    """Imports and returns the module that converts checkpoints, which loads Paddle."""
    return importlib.import_module("fleetpipe.contrib.formats.convert")


def _pairs_text(values: Mapping[str, object]) -> str:
    """Returns a text such as "dp 1, mp 2"."""
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _size_text(count: float) -> str:
    """Returns a number of bytes with a unit, such as "1.2 MB"."""
    for unit in _UNITS[:-1]:
        if count < 1000:
            return f"{count:.3g} {unit}" if unit != "B" else f"{count} B"
        count /= 1000
    return f"{count:.3g} {_UNITS[-1]}"


def print_escaped(text: object) -> None:
    """Prints text that may contain names from a file; control characters are escaped."""
    print(printable(str(text)))


def merge(reader: StepReader, target: Path) -> None:
    """Writes the model's parameters and buffers into one safetensors file, tensor by tensor.

    Args:
        reader: The checkpoint.
        target: The file to write; it appears only when it is complete.

    Raises:
        CheckpointError: The checkpoint cannot be read.
        OSError: The file cannot be written.
    """
    order = reader.manifest.order
    layout = tensors.layout_of(
        {n: reader.manifest.tensors[TensorName(MODEL, n)].tensor for n in order}
    )
    with (
        replacing(target.parent) as draft,
        (draft / target.name).open("wb", buffering=0) as file,
        reader.opened() as read,
    ):
        tensors.write_at(file, 0, layout.header)
        for name, stored in layout.tensors.items():
            memory = memoryview(bytearray(stored.tensor.nbytes))
            read(TensorName(MODEL, name), None, memory)
            tensors.write(file, stored, None, memory)


def differences(first: StepReader, second: StepReader) -> list[str]:
    """Returns lines about the differences of two steps; none if all tensors have equal bits."""
    tensors_1, tensors_2 = first.manifest.tensors, second.manifest.tensors
    lines = []
    for has, lacks, which in ((tensors_1, tensors_2, "first"), (tensors_2, tensors_1, "second")):
        only = [str(name) for name in has if name not in lacks]
        if only:
            more = f" and {len(only) - _MOST_SHOWN} more" * (len(only) > _MOST_SHOWN)
            lines.append(f"only the {which} has {', '.join(only[:_MOST_SHOWN])}{more}")
    common = [name for name in tensors_1 if name in tensors_2]
    differing = [
        name
        for name in common
        if tensors_1[name].tensor != tensors_2[name].tensor
        or _read_bytes(first, name) != _read_bytes(second, name)
    ]
    if differing:
        how = _describe_first_difference(first, second, differing[0])
        lines.append(f"{differing[0]} differs first: {how}")
        lines.append(f"{len(differing)} of {len(common)} tensors differ")
    return lines


def _read_bytes(reader: StepReader, name: TensorName) -> bytearray:
    """Returns the bytes of a tensor of a step."""
    memory = bytearray(reader.manifest.tensors[name].tensor.nbytes)
    with reader.opened() as read:
        read(name, None, memoryview(memory))
    return memory


def _describe_first_difference(first: StepReader, second: StepReader, name: TensorName) -> str:
    """Returns a text: how a tensor differs in two steps, and the first different element."""
    tensor, tensor_of_second = (r.manifest.tensors[name].tensor for r in (first, second))
    if tensor != tensor_of_second:
        return f"{tensor} and {tensor_of_second}"
    bits, bits_of_second = (
        np.frombuffer(_read_bytes(reader, name), f"u{tensor.itemsize}").reshape(tensor.shape)
        for reader in (first, second)
    )
    indices = np.argwhere(bits != bits_of_second)
    index = tuple(map(int, indices[0]))
    value, value_of_second = (_element_value(b[index], tensor) for b in (bits, bits_of_second))
    return (
        f"{len(indices)} of {bits.size} elements, the first at {list(index)}: "
        f"{value!r} and {value_of_second!r}"
    )


def _element_value(bits: np.generic, tensor: Described) -> float | str:
    """Returns the value of an element from its bits; the bits as text if NumPy lacks the dtype."""
    if tensor.dtype == "bfloat16":
        return float(np.array(int(bits) << 16, "uint32").view("float32"))
    code = CODES[tensor.dtype]
    if code.startswith("F8_"):
        return f"{int(bits):#04x}"
    value: float = bits.view(np.dtype(tensor.dtype)).item()
    return value
