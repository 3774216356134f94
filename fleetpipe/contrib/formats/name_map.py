"""Renames, reshapes and fuses a model's tensors, in the language of Paddle's ``aoa_config``.

A map is a JSON file, or the name of one in ``names/``:

    {"aoa_statements": ["model.layers.$LAYER_ID.mlp.up_proj.weight^T -> up.$LAYER_ID.weight", ..],
     "optional_statements": ["lm_head.weight^T -> lm_head.weight", ..]}

``^T`` transposes, ``a, b, c -> d, axis=1`` joins and the reverse splits, ``a -> _`` leaves out,
``a -> b, dtype='float16'`` casts. The optimizer's tensors and the master weights go with their
parameters, and keep their dtypes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fleetpipe.checkpoint.contents.parts import MASTER_WEIGHTS, MODEL, OPTIMIZER, TensorName
from fleetpipe.contrib.formats.contents import (
    Checkpoint,
    LazyTensor,
    bits_dtype,
    cover_without_overlap,
    join_names,
)
from fleetpipe.contrib.formats.distributed import Copied, compose
from fleetpipe.errors import CheckpointError, ConfigError, nearest
from fleetpipe.json_value import JsonValue, Source, read
from fleetpipe.mesh.parts import Described, Region

_FOLDER = Path(__file__).parent / "names"
#: The words of a statement that are no names of tensors: attributes, and patterns.
_NOT_A_NAME = re.compile(r"_?|.*[=*\[\]'].*|fused_(qkv|qkv_old|ffn)")
#: Stands for the number of each layer.
_LAYER = "$LAYER_ID"
_SOURCE = Source(
    "this is no map of names", ConfigError, "docs/checkpoints.md says what is in such a file"
)

#: The dtypes that can be cast, each with NumPy's dtype of its bits: NumPy has no bfloat16.
_BITS_BY_DTYPE = {"float32": "u4", "float16": "u2", "bfloat16": "u2"}
#: The bits of the bfloat16 that Paddle makes of a NaN.
_NAN_BITS = 0x7FFF


@dataclass(frozen=True)
class NameMap:
    """A map of names: statements of Paddle's ``aoa_config``, which rename, split and join tensors.

    Attributes:
        aoa_statements: Statements whose tensors must all exist.
        optional_statements: Statements that are used if their tensors exist.
        reverse: Whether statements are read from right to left.
        file: The path of the map, for errors.
    """

    aoa_statements: tuple[str, ...]
    optional_statements: tuple[str, ...] = ()
    reverse: bool = False
    file: str = ""


def read_map(name: str, *, reverse: bool) -> NameMap:
    """Reads a map of names.

    Args:
        name: The path of a file, or the name of a map that fleetpipe has.
        reverse: Whether its statements are read from right to left.

    Raises:
        ConfigError: There is no such file, or it is not a map.
    """
    built_in = {path.stem: path for path in _FOLDER.glob("*.json")}
    path = built_in.get(name, Path(name))
    if not path.is_file():
        raise ConfigError(f"there is no map of names {name!r}", fix=nearest(name, built_in))

    def parse_map(value: JsonValue) -> NameMap:
        value.require_names(("aoa_statements", "optional_statements"))
        optional = value.get("optional_statements")
        texts = value["aoa_statements"].texts()
        return NameMap(texts, () if optional is None else optional.texts(), reverse, str(path))

    return read(path, _SOURCE, parse_map)


def rename(state: Checkpoint, names: NameMap) -> Checkpoint:
    """Returns a checkpoint whose tensors are renamed, split and joined as a map says.

    Raises:
        CheckpointError: The checkpoint has tensors that the map does not cover, or lacks some.
        ConfigError: A statement does not fit.
    """
    model = state.of(MODEL)
    shapes = {name: tensor.described for name, tensor in model.items()}
    outputs, unread = compose(_statements_to_use(names, model), names.reverse, shapes)
    if unread:
        raise CheckpointError(
            f"the map of names does not speak of {len(unread)} tensors of the checkpoint",
            got=join_names(unread),
            fix="add a statement for each, 'name -> _' leaves one out; or take the map of this "
            "model, --reverse-names if it is for the other direction",
        )
    contents = {
        TensorName(MODEL, name): _joined_tensor(parts, model) for name, parts in outputs.items()
    }
    for name, parts in outputs.items():
        for group, kind, sources in _optimizer_tensors(state):
            if all(part.source in sources for part in parts):
                full = TensorName(group, f"{name}/{kind}" if kind else name)
                if "pow" in kind:
                    # Powers of beta are one number, whatever the shape of the parameter.
                    contents[full] = sources[parts[0].source]
                else:
                    uncast = [part._replace(casts=()) for part in parts]
                    contents[full] = _joined_tensor(uncast, sources)
    # The tensors are in the order of the statements.
    return replace(state, tensors=contents, plain_order=tuple(outputs))


def _optimizer_tensors(state: Checkpoint) -> list[tuple[str, str, dict[str, LazyTensor]]]:
    """Returns the tensors that belong to parameters: optimizer state and master weights.

    Returns:
        For each kind its group, the kind's name ("" for master weights), and the tensors by the
        name of their parameter.
    """
    kinds: dict[str, dict[str, LazyTensor]] = {}
    for name, tensor in state.of(OPTIMIZER).items():
        parameter, _, kind = name.rpartition("/")
        kinds.setdefault(kind, {})[parameter] = tensor
    of_optimizer = [(OPTIMIZER, kind, sources) for kind, sources in kinds.items()]
    return [*of_optimizer, (MASTER_WEIGHTS, "", state.of(MASTER_WEIGHTS))]


def _statements_to_use(names: NameMap, model: Mapping[str, LazyTensor]) -> list[str]:
    """Returns the statements that apply to a model, written for each layer where that is needed.

    Args:
        names: The map.
        model: The tensors of the model, by name.

    Raises:
        CheckpointError: A tensor that a statement needs is missing, perhaps of some layer only.
        ConfigError: A statement writes over a tensor that a later one reads.
    """
    statements = [*names.aoa_statements]
    # A statement reads the names on one side of its arrow, and makes those on the other side.
    results = {n for s in statements for n in _names_on_side(s, right=not names.reverse)}
    inputs = {n for s in statements for n in _names_on_side(s, right=names.reverse)}
    # By name or pattern, the numbers of the layers that have such a tensor.
    layers = {pattern: _layer_numbers(pattern, model) for pattern in sorted(inputs)}
    # The inputs that another statement makes need not exist.
    layers = {name: numbers for name, numbers in layers.items() if numbers or name not in results}
    # The numbers of all layers: each pattern of a layer must have a tensor in each of them.
    every = set().union(*(numbers for name, numbers in layers.items() if _LAYER in name))
    for pattern, numbers in layers.items():
        lacking = sorted(every - numbers, key=int) if _LAYER in pattern else []
        if not numbers or lacking:
            missing = [pattern.replace(_LAYER, number) for number in lacking] or [pattern]
            raise CheckpointError(
                "the checkpoint lacks tensors of which the map of names speaks",
                got=join_names(missing),
                fix="take the map of this model; copy the checkpoint again if it is cut short",
            )
    for statement in names.optional_statements:
        if all(
            _layer_numbers(pattern, model)
            for pattern in _names_on_side(statement, right=names.reverse)
        ):
            statements.append(statement)
    _require_order(statements, names.reverse, model)
    # Paddle expands $LAYER_ID by itself only in names that are in the checkpoint, and only if both
    # sides of a statement have it: "X -> _" drops X. All other statements are written here, once
    # for each layer.
    results_only = {pattern for pattern in inputs - layers.keys() if _LAYER in pattern}
    expanded: list[str] = []
    for statement in statements:
        sources = _names_on_side(statement, right=names.reverse)
        reads_result = not results_only.isdisjoint(sources)
        is_one_sided = sum(_LAYER in side for side in statement.split("->")) == 1
        if reads_result or is_one_sided:
            expanded += (statement.replace(_LAYER, number) for number in sorted(every, key=int))
        else:
            expanded.append(statement)
    return expanded


def _require_order(
    statements: Sequence[str], reverse: bool, model: Mapping[str, LazyTensor]
) -> None:
    """Raises ``ConfigError`` if a statement reuses the name of a tensor that is read later.

    Paddle runs the statements one after another: after ``a -> b``, the statement ``b -> c`` reads
    what was ``a``, and the tensor ``b`` of the checkpoint is lost, unless an earlier statement has
    read it.

    Args:
        statements: The statements, as they stand in the map.
        reverse: Whether they are read from right to left, the last one first.
        model: The tensors of the model, by name.
    """
    # The names, or patterns of names, that the statements so far have read and written.
    read: set[str] = set()
    written: set[str] = set()
    for statement in reversed(statements) if reverse else statements:
        sources = {*_names_on_side(statement, right=reverse)}
        results = {*_names_on_side(statement, right=not reverse)}
        reused = [n for n in sorted(sources & written - read) if _layer_numbers(n, model)]
        if reused:
            raise ConfigError(
                "statements of the map put another tensor under a name before they read its own",
                got=f"{statement!r}, after one that makes {', '.join(reused)}",
                fix="read it first, under a name of its own: a -> t, b -> a, t -> b swaps two",
            )
        read |= sources
        written |= results


def _names_on_side(statement: str, *, right: bool) -> list[str]:
    """Returns the names, or patterns of names, on one side of a statement."""
    side = statement.split("->")[-1 if right else 0]
    words = (word.strip().removesuffix("^T") for word in side.split(","))
    return [word for word in words if not _NOT_A_NAME.fullmatch(word)]


def _layer_numbers(pattern: str, model: Mapping[str, LazyTensor]) -> set[str]:
    """Returns the numbers of the layers that have a tensor of a pattern of names.

    For a pattern without ``$LAYER_ID`` it returns ``{""}`` if there is such a tensor, or if the
    pattern has another variable, which is not looked up.
    """
    if _LAYER not in pattern:
        return {""} if pattern in model or "$" in pattern else set()
    text = re.escape(pattern).replace(re.escape(_LAYER), r"(\d+)", 1)
    expression = re.compile(text.replace(re.escape("$EXPERT_ID"), r"\d+"))
    return {match[1] for name in model if (match := expression.fullmatch(name))}


def _joined_tensor(parts: Sequence[Copied], sources: Mapping[str, LazyTensor]) -> LazyTensor:
    """Returns a tensor that is joined from parts of other tensors when it is read.

    Args:
        parts: The parts: of which tensor, the region there, and the region in the new tensor.
        sources: The tensors from which the parts come, by name.
    """
    described = _describe_joined(parts, sources)

    def read(cut: Region | None) -> np.ndarray:
        full = np.empty(described.shape, bits_dtype(described))
        for part in parts:
            full[part.put] = _read_part(part, sources[part.source])
        return full if cut is None else cut.taken_from(full)

    return LazyTensor(described, read)


def _describe_joined(parts: Sequence[Copied], sources: Mapping[str, LazyTensor]) -> Described:
    """Returns the dtype and shape of a tensor that is joined from parts.

    Raises:
        CheckpointError: The parts have several dtypes, or a source has not the expected shape.
        ConfigError: The parts cannot be joined.
    """
    dtypes = {_dtype_of(part, sources[part.source].described.dtype) for part in parts}
    if len(dtypes) != 1:
        names = ", ".join(f"{p.source} {sources[p.source].described.dtype}" for p in parts)
        raise CheckpointError(
            "tensors of several dtypes cannot be joined",
            got=names,
            fix="save them in one dtype, or leave them apart",
        )
    for part in parts:
        source = sources[part.source].described
        if any(piece.stop > size for piece, size in zip(part.taken, source.shape)):
            raise CheckpointError(
                f"what belongs to {part.source!r} has another shape",
                got=str(source),
                fix="save the checkpoint again: its optimizer is that of another model",
            )
        if any(sorted(order) != [*range(len(part.taken))] for order in part.orders):
            raise ConfigError(
                f"permute= is no order of the axes of {part.source!r}, {source}",
                got=str(part.orders),
                fix="give each axis once, from 0",
            )
    by_axis = zip(*(part.put for part in parts))
    shape = tuple(max(interval.stop for interval in axis) for axis in by_axis)
    boxes = [([s.start for s in p.put], [s.stop - s.start for s in p.put]) for p in parts]
    if not cover_without_overlap(boxes, shape):
        raise ConfigError(
            "tensors of these shapes cannot be joined",
            got=join_names([f"{p.source} {[*sources[p.source].described.shape]}" for p in parts]),
            fix="join along the axis in which alone they differ, axis=",
        )
    return Described(dtypes.pop(), shape)


def _dtype_of(part: Copied, dtype: str) -> str:
    """Returns the dtype of a part after its casts; ``dtype`` is that of the tensor it is cut from.

    Raises:
        ConfigError: A cast is between dtypes other than float32, float16 and bfloat16.
    """
    for target in part.casts:
        if not {dtype, target} <= _BITS_BY_DTYPE.keys():
            raise ConfigError(
                f"{part.source!r} cannot be cast from {dtype} to {target}",
                expected="float32, float16 or bfloat16",
                fix="leave dtype= out of its statement: the tensor keeps its bits",
            )
        dtype = target
    return dtype


def _read_part(part: Copied, source: LazyTensor) -> np.ndarray:
    """Reads a part of a tensor, and permutes and casts it; returns the bits."""
    array, dtype = source.read()[part.taken], source.described.dtype
    for order in part.orders:
        array = array.transpose(order)
    for target in part.casts:
        array, dtype = _cast(array, dtype, target), target
    return array


def _cast(values: np.ndarray, source: str, target: str) -> np.ndarray:
    """Casts an array, rounded to the nearest, ties to even.

    The results have the bits of ``paddle.cast``, except that numbers between 1.6e-27 and 6.7e-24
    become 0 in float16, which ``paddle.cast`` gets wrong.

    Args:
        values: The bits of the numbers, as unsigned integers of the same size.
        source: The dtype of the numbers: float32, float16 or bfloat16.
        target: The new dtype.

    Returns:
        The bits of the new numbers.
    """
    if source == target:
        return values
    if source == "bfloat16":
        floats: np.ndarray = (values.astype("u4") << 16).view("f4")
    else:
        floats = values.view(source)
    if target == "bfloat16":
        numbers = floats.astype("f4", copy=False)
        bits = numbers.view("u4")
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(numbers), _NAN_BITS, rounded).astype("u2")
    with np.errstate(over="ignore", under="ignore"):
        result: np.ndarray = floats.astype(target)
    return result.view(_BITS_BY_DTYPE[target])
