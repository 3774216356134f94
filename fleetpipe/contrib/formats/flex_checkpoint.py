"""Paddle's distributed checkpoint: the classes of its metadata, and its language for names.

Both are 3.3's. 2.6.2 has fewer fields in another module, which readers allow for, and no language.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fleetpipe.errors import ConfigError
from fleetpipe.paddle_api import VERSION

_METADATA = "dcp.metadata"
#: The names of the classes that a file of metadata is made of, in 3.3 and before.
RECORDS = frozenset(
    f"paddle.distributed.{module}.{name}"
    for module in (f"flex_checkpoint.{_METADATA}", "checkpoint.metadata")
    for name in ("Metadata", "LocalTensorMetadata", "LocalTensorIndex")
)
#: Stands before names of layers of a list, ``0.weight``: the language has no names of digits.
_NUMBERED = "numbered_"
_NUMBER = re.compile(r"(?<![\w.$])(?=\d+\.|\$LAYER_ID\.)")
_MISFITS = (AssertionError, ValueError, LookupError, SyntaxError, RuntimeError)


class Copied(NamedTuple):
    """A part of a tensor that becomes a part of a new tensor.

    Attributes:
        source: The name of the tensor that it is read from.
        taken: The part of the source.
        put: The place in the new tensor.
        orders: The permutations of its axes, one after another.
        casts: The dtypes that it is cast to, one after another.
    """

    source: str
    taken: tuple[slice, ...]
    put: tuple[slice, ...]
    orders: tuple[list[int], ...]
    casts: tuple[str, ...]


def _module(name: str) -> Any:
    try:
        return importlib.import_module(f"paddle.distributed.flex_checkpoint.{name}")
    except ImportError:
        raise ConfigError(
            f"Paddle {VERSION} has no flex_checkpoint, which this conversion needs",
            fix="convert with Paddle 3.3",
        ) from None


def metadata_of(tensors: Mapping[str, tuple[str, tuple[int, ...], str]]) -> Any:
    """Returns the metadata of a checkpoint in which every tensor is whole.

    Args:
        tensors: The dtype, the shape and the file of each, by name.
    """
    classes = _module(_METADATA)
    described, places = {}, {}
    for name, (dtype, shape, file) in tensors.items():
        begin = (0,) * len(shape)
        described[name] = [classes.LocalTensorMetadata(begin, shape, dtype, shape)]
        places[classes.LocalTensorIndex(name, begin, local_shape=shape)] = file
    return classes.Metadata(described, places, {name: (name,) for name in tensors})


def compose(
    statements: Sequence[str], reverse: bool, shapes: Mapping[str, tuple[str, tuple[int, ...]]]
) -> tuple[dict[str, tuple[Copied, ...]], list[str]]:
    """Applies statements of Paddle's ``aoa_config`` to the tensors of a model.

    Args:
        statements: The statements, such as ``"a.weight^T -> b.weight"``.
        reverse: Whether they are read from right to left.
        shapes: The dtype and shape of each tensor of the model, by name.

    Returns:
        The parts of each resulting tensor; and the names that no statement reads.

    Raises:
        ConfigError: This Paddle has no such language, or a statement does not fit the model.
    """
    described = _module("dcp.sharded_weight").ShardedWeightDesc
    words = {_NUMBER.sub(_NUMBERED, name): one for name, one in shapes.items()}
    shards = {
        name: [described(name, shape, shape, (0,) * len(shape), dtype)]
        for name, (dtype, shape) in words.items()
    }
    config = {
        "aoa_statements": [_NUMBER.sub(_NUMBERED, statement) for statement in statements],
        "aoa_config_reverse": reverse,
        "enable_traceback": False,
    }
    new_engine = _module("aoa.aoa_engine").AOAEngine
    try:
        engine = new_engine(config, shards, None)
    except _MISFITS as error:
        raise ConfigError(
            "a statement of the map does not fit the tensors",
            got=str(error)[:300],
            fix="correct it, in the language of Paddle's aoa_config; docs/checkpoints.md has one",
        ) from error
    outputs, unread = {}, []
    for word, tensor in engine.output_vars.items():
        name = word.removeprefix(_NUMBERED)
        # What no statement reads comes out under its own name, and is no result of one.
        if word in engine.input_vars and word not in engine.intermediate_vars:
            unread.append(name)
        outputs[name] = tuple(
            _copy_of(source.removeprefix(_NUMBERED), taken, put, steps or ())
            for source, taken, put, steps in tensor.slices
        )
    unknown = [name for name in outputs if "$" in name]
    if unknown:
        raise ConfigError(
            "a statement of the map has an unknown placeholder",
            got=", ".join(unknown[:10]),
            expected="$LAYER_ID or $EXPERT_ID",
            fix="correct it",
        )
    read = {part.source for parts in outputs.values() for part in parts}
    left_out = {word.removeprefix(_NUMBERED) for word in engine.need_remove_input_vars}
    lost = [name for name in shapes if name not in read and name not in left_out]
    if lost:
        raise ConfigError(
            "of statements that make the same tensor one would count alone",
            got=f"nothing is made of {', '.join(lost[:10])}",
            fix="give each tensor a name of its own; 'name -> _' leaves one out",
        )
    return outputs, unread


def _copy_of(
    source: str, taken: Sequence[slice], put: Sequence[slice], steps: Sequence[str]
) -> Copied:
    orders = (ast.literal_eval(step) for step in steps if step.startswith("["))
    casts = (step for step in steps if not step.startswith("["))
    return Copied(source, tuple(taken), tuple(put), tuple(orders), tuple(casts))
