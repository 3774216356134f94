"""Checks the degrees of ``hybrid_configs``; each error names a degree that would work."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fleetpipe.errors import ConfigError, nearest, require_whole

#: Options of ``sharding_configs`` that are refused; split_param is that optimizer's version 2.
_OTHER_SHARDING = ("split_param", "tensor_fusion", "comm_overlap")

#: The axes along which sums have no tree, with what is added up there.
_WITHOUT_TREE = {
    "sep": "parts of attention",
    "cp": "parts of attention",
    "ep": "what experts get from many ranks",
    "moe_sharding": "what experts get from many ranks",
}


def separate_cp(wanted: dict[str, int], cp_sharding: Any) -> bool:
    """Makes cp an axis of its own: divides the sharding degree by cp if Fleet counts cp within it.

    In Fleet's topology of experts ``sharding_degree`` covers ``cp_degree``; otherwise cp is an axis
    of its own, unless ``cp_sharding_degree`` gives the rest.

    Args:
        wanted: The degrees by axis; that of sharding may be changed.
        cp_sharding: The option ``cp_sharding_degree``.

    Returns:
        Whether Fleet counts cp within sharding.

    Raises:
        ConfigError: The degrees contradict each other.
    """
    require_degree("cp_sharding_degree", cp_sharding)
    cp, sharding = wanted["cp"], wanted["sharding"]
    if cp_sharding > 1 and cp_sharding * cp != sharding:
        raise ConfigError(
            "cp_sharding_degree is what cp_degree leaves of sharding_degree",
            where="strategy.hybrid_configs",
            expected=f"cp_degree x cp_sharding_degree = {sharding}, the sharding_degree",
            got=f"{cp} x {cp_sharding}",
            fix=f"cp_sharding_degree={max(sharding // cp, 1)}, or leave it out",
        )
    within = 1 < cp <= sharding and (wanted["ep"] > 1 or cp_sharding > 1)
    if within and sharding % cp:
        raise ConfigError(
            f"cp_degree (={cp}) must divide sharding_degree (={sharding}) beside ep_degree",
            where="strategy.hybrid_configs",
            cause="there the ranks along cp are part of those along sharding, as in Fleet",
            fix=f"set cp_degree={nearest_divisor(sharding, cp)}",
        )
    if within:
        wanted["sharding"] = sharding // cp
    return within


def shrink_pipeline(
    wanted: dict[str, int], axes: Sequence[str], world_size: int, whole_size: int | None
) -> int:
    """Lowers ``pp_degree`` in a job that goes on with fewer ranks than it began with.

    Degrees that fit the present ranks stay, as if the script has computed them.

    Args:
        wanted: The degrees by axis; that of pp may be changed.
        axes: The axes that number ranks.
        world_size: The present number of ranks.
        whole_size: The number of ranks when the job began; None if it is the same.

    Returns:
        The earlier ``pp_degree``, if it was changed; else 0.
    """
    product = math.prod(wanted[axis] for axis in axes if wanted[axis] > 0)
    if whole_size is None or not 1 < world_size < product:
        return 0
    # With dp_degree -1, stages are taken out once there is one replica only.
    fitted_before = whole_size % product == 0 if wanted["dp"] == -1 else whole_size == product
    pp = wanted["pp"]
    if fitted_before and pp * world_size % product == 0:
        wanted["pp"] = pp * world_size // product
        return pp
    return 0


def infer_dp(wanted: int, rest: Mapping[str, int], world_size: int) -> int:
    """Returns ``dp_degree``, computed from the number of ranks.

    Args:
        wanted: The script's ``dp_degree``; -1 to compute it.
        rest: The degrees along the other axes that number ranks, by axis.
        world_size: The number of ranks.

    Raises:
        ConfigError: The degrees do not multiply to the number of ranks.
    """
    product = math.prod(rest.values())
    needed = product * max(wanted, 1)
    if world_size % product:
        degrees = {**rest, "dp": wanted} if wanted >= 1 else rest
        raise ConfigError(
            f"the degrees (={degrees_in_words(degrees)}) do not divide "
            f"the world size (={world_size})",
            expected=f"a multiple of {product} processes",
            got=f"{world_size} processes",
            fix=f"launch with --nproc_per_node {needed}, or "
            + _suggest_degree(degrees, world_size),
        )
    inferred = world_size // product
    if wanted >= 1 and wanted != inferred:
        raise ConfigError(
            f"the degrees multiply to {needed}, the job has {world_size} ranks",
            expected=f"dp_degree={inferred}, or -1 to have it worked out",
            got=f"dp_degree={wanted} with {degrees_in_words(rest)}",
            fix=f"launch with --nproc_per_node {needed}, or change a degree",
        )
    return inferred


def _suggest_degree(rest: Mapping[str, int], world_size: int) -> str:
    """Returns a text that names one degree whose change makes all divide the ranks."""
    product = math.prod(rest.values())
    for axis, degree in rest.items():
        rest_of_product = product // degree
        if degree > 1 and world_size % rest_of_product == 0:
            left = world_size // rest_of_product
            # With a fixed dp_degree the product must be all ranks.
            nearest = left if "dp" in rest else nearest_divisor(left, degree)
            return f"set {axis}_degree={nearest}, the nearest that divides"
    return "lower a degree"


def expert_degrees(wanted: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Returns the degrees along ep and moe_sharding; {} if neither is above 1.

    Args:
        wanted: The script's degrees by axis.
        ranks: The number of ranks of a stage.

    Raises:
        ConfigError: They do not multiply to the ranks of a stage.
    """
    ep, moe_sharding = wanted["ep"], wanted["moe_sharding"]
    if ep == moe_sharding == 1:
        return {}
    if ranks % ep:
        raise ConfigError(
            f"ep_degree (={ep}) must divide the {ranks} ranks of a stage",
            where="strategy.hybrid_configs",
            cause="experts are spread over the ranks along dp, sharding, sep, cp and mp",
            fix=f"set ep_degree={nearest_divisor(ranks, ep)}, the nearest that divides",
        )
    if moe_sharding not in (1, ranks // ep):
        raise ConfigError(
            f"ep_degree x moe_sharding_degree must be the {ranks} ranks of a stage",
            where="strategy.hybrid_configs",
            got=f"{ep} x {moe_sharding}",
            fix=f"set moe_sharding_degree={ranks // ep}, or leave it out",
        )
    return {"ep": ep, "moe_sharding": ranks // ep}


def refuse_alone(degrees: Mapping[str, int]) -> None:
    """Raises the error for axes that one process cannot play alone, with the ranks they need."""
    split = {axis: degree for axis, degree in degrees.items() if degree > 1}
    experts = {axis: split[axis] for axis in ("moe_sharding", "ep") if axis in split}
    ranks = math.prod(degree for axis, degree in split.items() if axis not in experts)
    ranks = math.lcm(ranks, split.get("pp", 1) * math.prod(experts.values()))
    raise ConfigError(
        "one process plays all ranks of a pipeline, but not those of another axis",
        expected="every degree 1 except pp_degree",
        got=degrees_in_words(split),
        fix=f"fleetpipe run --nproc {ranks} train.py, or leave all but pp_degree out",
    )


def nearest_divisor(number: int, wanted: int) -> int:
    """Returns the divisor of ``number`` that is nearest to ``wanted``."""
    divisors = (divisor for divisor in range(1, number + 1) if number % divisor == 0)
    return min(divisors, key=lambda divisor: abs(divisor - wanted))


def require_degree(name: str, degree: Any, least: int = 1) -> None:
    """Refuses a degree that is not a whole number of at least ``least``."""
    fix = f"set strategy.hybrid_configs = {{{name!r}: 2}}, or leave it out"
    require_whole(name, degree, least, where="strategy.hybrid_configs", fix=fix)


def require_order(order: Sequence[str], axes: Collection[str]) -> None:
    """Refuses an order of ranks with an unknown axis or with an axis twice."""
    for index, axis in enumerate(order):
        if axis not in axes or axis in order[:index]:
            raise ConfigError(
                "hybrid_configs['order'] names axes, each once",
                where="strategy.hybrid_configs",
                expected=f"some of {', '.join(axes)}; those left out are put where Fleet has them",
                got=f"{axis!r} in {order!r}",
                fix="name each axis once" if axis in axes else nearest(str(axis), axes),
            )


def sharding_stage(strategy: Any) -> int:
    """Returns the stage of sharding: 1 shards the optimizer's state, 2 gradients too.

    Raises:
        ConfigError: The strategy asks for stage 3, or for options that fleetpipe lacks.
    """
    stage = strategy.sharding_configs.get("stage", 1) if strategy.sharding else 1
    if stage not in (1, 2):
        _refuse_sharding(f"sharding_configs['stage'] = {stage}")
    configs = strategy.hybrid_configs.get("sharding_configs")
    for option in _OTHER_SHARDING:
        if getattr(configs, option, False):
            _refuse_sharding(f"hybrid_configs['sharding_configs'].{option} = True")
    return int(stage)


def _refuse_sharding(got: str) -> None:
    """Raises the error for an option of sharding, ``got``, that fleetpipe lacks."""
    raise ConfigError(
        "sharding_degree above 1 runs stages 1 and 2: a rank owns the state, and in stage 2 the "
        "gradients, of whole parameters",
        got=got,
        cause="stage 3 scatters parameters as well, and these options pieces of them",
        fix="strategy.sharding = True; strategy.sharding_configs = {'stage': 2}; for parameters "
        "raise pp_degree or mp_degree, each rank of which holds its part alone",
    )


def degrees_in_words(degrees: Mapping[str, int]) -> str:
    """Returns degrees under their names in ``hybrid_configs``, for messages."""
    return ", ".join(f"{axis}_degree={degree}" for axis, degree in degrees.items())


def require_tree(degrees: Mapping[str, int], dynamic: bool, device: str) -> None:
    """Refuses degrees, a graph mode or a device that do not go with sums by a tree.

    Args:
        degrees: The degrees by axis.
        dynamic: Whether the job trains in dynamic graph.
        device: The kind of its devices, such as "cpu".
    """
    where = "strategy.fleetpipe_configs['sums'] = 'tree'"
    without = "or leave 'sums' out"
    if not dynamic:
        raise ConfigError("sums by a tree are of dynamic graph", where=where, fix=without[3:])
    if degrees["mp"] > 1 and device != "cpu":
        raise ConfigError(
            f"sums by a tree do not go with mp_degree (={degrees['mp']}) on a {device}",
            where=where,
            cause="there tensor-parallel layers are Paddle's own, and sum up as many parts as "
            "mp_degree",
            fix=f"set mp_degree=1, {without}",
        )
    for axis, summed in _WITHOUT_TREE.items():
        if degrees[axis] > 1:
            raise ConfigError(
                f"sums by a tree do not go with {axis}_degree (={degrees[axis]})",
                where=where,
                cause=f"along {axis} ranks add up {summed}, in an order that depends on the degree",
                fix=f"set {axis}_degree=1, {without}",
            )
    for axis in ("dp", "sharding", "mp"):
        degree = degrees[axis]
        if degree & (degree - 1):
            raise ConfigError(
                f"with sums by a tree {axis}_degree (={degree}) must be a power of two",
                where=where,
                cause="each rank holds whole branches of the tree, as many as any other",
                fix=f"set {axis}_degree={1 << degree.bit_length() - 1}, {without}",
            )
