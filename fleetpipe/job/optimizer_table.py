"""Decides whether an optimizer or a clip is known to be right on ranks that hold parts of a model.

An optimizer of a table changes a weight by that weight, its gradient and its state alone; a row of
``CLIPS`` scales each gradient by itself, or by a norm that fleetpipe takes over all ranks. A
subclass of a row counts as that row if it replaces no method, or only logs before or after the
method that it replaces. Any other class may need values that another rank holds, and is refused if
ranks hold parts of a model. If each rank has the whole model, every class is right.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Collection, Mapping
from types import CodeType, FunctionType

from fleetpipe.aliases import Clip, Optimizer
from fleetpipe.errors import ConfigError
from fleetpipe.job.job import Job
from fleetpipe.paddle_api.optimizer import is_paddles, names_used_in_class, wrapper_chain

#: Names of classes by the package that has them.
Table = Mapping[str, Collection[str]]

#: Optimizers that update each element of a weight by itself.
OF_NUMBERS: Table = {
    "paddle.optimizer": (
        *("SGD", "Momentum", "Adam", "AdamW", "Adamax", "Adagrad", "Adadelta", "RMSProp"),
        *("NAdam", "RAdam", "ASGD", "Rprop"),  # those of 3.x
    ),
    "paddlenlp.ops.optimizer": ("AdamWDL",),
    "paddlenlp.utils.optimizer": ("AdamWCustom", "AdamW_16Bit"),
    "paddleformers.utils.optimizer": ("AdamWCustom",),
}
#: Optimizers that need a whole weight: its norm, or the mean square of its gradient.
OF_WEIGHTS: Table = {
    "paddle.optimizer": ("Lamb",),
    "paddle.incubate.optimizer": ("LarsMomentumOptimizer",),
    "paddlenlp.utils.optimizer": ("AdamWMini",),
    "paddleformers.utils.optimizer": ("AdamWMini",),
}
#: Wrappers of an optimizer, which only call its step.
WRAPPERS: Table = {
    "paddle.distributed.fleet": (
        *("MixPrecisionOptimizer", "HybridParallelOptimizer", "DygraphShardingOptimizer"),
        "HybridParallelGradScaler",
    ),
    "fleetpipe": ("PipelineOptimizer",),
}
#: Clips that scale each gradient by itself, or by a norm over all ranks.
CLIPS: Table = {
    "paddle.nn.clip": ("ClipGradByValue", "ClipGradByNorm", "ClipGradByGlobalNorm"),
    "paddle.incubate.distributed.models.moe": ("ClipGradForMOEByGlobalNorm",),
    "fleetpipe": ("GlobalNormClip", "SlicedNormClip"),
}

#: Methods of its row that a subclass may replace: they change no step.
_OUTSIDE_A_STEP = {"__init__", "__repr__", "__str__", "extra_repr", "get_lr"}
_OUTSIDE_A_STEP |= {"set_dict", "set_state_dict", "state_dict"}
_OUTSIDE_A_STEP |= {"clear_grad", "clear_gradients", "set_lr"}
# Trainers replace it to log the norm that a clip has computed.
_OUTSIDE_A_STEP |= {"_global_norm"}
#: Names that a method which only logs may use: they reach neither weights nor gradients.
_NOTES = {"super", "append", "print", "len", "min", "max", "sum", "int", "float", "round"}
_NOTES |= {"logging", "logger", "info", "debug", "warning"}
#: Further names for a method without branches: times differ between ranks.
_CLOCKS = {"time", "perf_counter", "monotonic"}


def row_of(table: Table, value: object) -> str | None:
    """Returns the name of the table's class to which a value belongs; None if there is none.

    That is the first class of the table among the value's class and base classes, if no class below
    it, nor the value itself, replaces a method with one that does more than log.

    Args:
        table: The table.
        value: An optimizer, a wrapper of one, or a clip.
    """
    # By name, what the value itself and each class below the present ``kind`` define.
    members = [(name, member) for name, member in vars(value).items() if callable(member)]
    for kind in type(value).__mro__:
        if _has_class(table, kind):
            replaced = [
                (name, member)
                for name, member in members
                if name not in _OUTSIDE_A_STEP and callable(getattr(kind, name, None))
            ]
            fits = all(_only_logs(name, method, value, kind) for name, method in replaced)
            return kind.__name__ if fits else None
        members += vars(kind).items()
    return None


def _has_class(table: Table, kind: type) -> bool:
    """Returns whether a table has a class, by its name and the name of a package that has it."""
    return any(
        f"{kind.__module__}.".startswith(f"{package}.") and kind.__name__ in names
        for package, names in table.items()
    )


def _only_logs(name: str, method: object, value: object, kind: type) -> bool:
    """Returns whether a method only calls its base class's and logs, judged from its bytecode.

    Besides ``super``, its code uses only ``_NOTES``, the value's classes, and attributes of the
    value that are numbers, texts or lists of these, or that it sets and never reads. The code of
    ``kind`` uses none of these attributes.

    Args:
        name: The name of the method.
        method: The method.
        value: The object that has it.
        kind: The class of the table.
    """
    if not isinstance(method, FunctionType):
        return False
    code, names = method.__code__, {*method.__code__.co_names}
    takes_self_only = inspect.getargs(code) == (["self"], None, None)
    has_functions = any(isinstance(constant, CodeType) for constant in code.co_consts)
    if has_functions or not takes_self_only or not {"super", name} <= names:
        return False
    instructions = [*dis.get_instructions(code)]
    # With a branch, ranks could act differently by their clocks.
    branches = any("_IF_" in each.opname for each in instructions)
    names_read = {str(each.argval) for each in instructions if each.opname != "STORE_ATTR"}
    # Names of attributes that are numbers or texts, or that the method sets and never reads.
    plain = {word for word in names if _is_plain(getattr(value, word, None))}
    harmless = (names - names_read) | plain
    functions = {
        word
        for word in (_NOTES if branches else _NOTES | _CLOCKS)
        if not (hasattr(value, word) or isinstance(method.__globals__.get(word), FunctionType))
    }
    allowed = functions | (harmless - names_used_in_class(kind)) | {name, "get_lr"}
    allowed |= {each.__name__ for each in type(value).__mro__}
    return names <= allowed and {*code.co_freevars} <= {"__class__"}


def _is_plain(value: object) -> bool:
    """Returns whether a value is a number or a text, or a list of these."""
    items = value if isinstance(value, list) else [value]
    return all(isinstance(item, (int, float, str)) for item in items)


def require_optimizer(optimizer: Optimizer, job: Job) -> None:
    """Refuses an optimizer that may need values which another rank holds.

    Args:
        optimizer: The optimizer, or a wrapper of one.
        job: The current job.

    Raises:
        ConfigError: The optimizer is not one of Paddle's; or it is in no table, ranks hold parts of
            a model, and the script does not allow it.
    """
    *wrappers, base = wrapper_chain(optimizer)
    if not is_paddles(base):
        raise ConfigError(
            "an optimizer has the parameters and groups of Paddle's",
            got=type(base).__name__,
            fix="pass one of paddle.optimizer, or a subclass",
        )
    unknown = [part for part in wrappers if row_of(WRAPPERS, part) is None]
    # Along mp a rank has shards of weights, not whole ones.
    whole = row_of(OF_WEIGHTS, base) if job.degrees.mp == 1 else None
    if whole is None and row_of(OF_NUMBERS, base) is None:
        unknown.append(base)
    for part in unknown if _has_parts(job) else ():
        job.allow.refuse(
            "optimizer",
            type(part).__name__,
            "an optimizer is not known to step right where ranks hold parts of a model",
            expected="one of paddle.optimizer (Lamb and Lars without mp), or a subclass that "
            "replaces no method of a step, unless to log",
            cause="it may compute with the weights or norms of all ranks, clip within what it "
            "wraps by those of one, or keep state that no checkpoint has",
            fix="pass the optimizer inside of it, or Paddle's own",
        )


def require_clip(clip: Clip, job: Job | None) -> bool:
    """Returns whether a clip is in its table; refuses others where ranks hold parts of a model.

    Args:
        clip: The clip; None counts as one in the table.
        job: The current job; None without one.

    Raises:
        ConfigError: The clip is refused, and the script does not allow it.
    """
    is_known = clip is None or row_of(CLIPS, clip) is not None
    if not is_known and job is not None and _has_parts(job):
        job.allow.refuse(
            "clip",
            type(clip).__name__,
            "a clip is not known to be right where ranks hold parts of a model",
            expected="ClipGradByGlobalNorm, ClipGradByNorm or ClipGradByValue of paddle.nn, or a "
            "subclass that replaces no method",
            cause="it may compute with the gradients of one rank, not of all",
            fix="clip with one of these; a clip's clip_norm may change between batches",
        )
    return is_known


def _has_parts(job: Job) -> bool:
    """Returns whether each process holds, or updates, only a part of the model.

    A process holds a part along pp, mp and ep, and updates a part if ranks shard the optimizer's
    state. If one process plays all ranks of the job, ``job.local``, it holds the whole model.
    """
    # ``degrees.split`` is the product of these degrees.
    return not job.local and (job.degrees.split("pp", "mp", "ep") > 1 or job.sharding().ranks > 1)
