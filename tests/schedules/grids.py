"""Draws the grids that open the files of the families and stand on their pages."""

from __future__ import annotations

from fleetpipe.schedules import Action, Item, build
from fleetpipe.schedules.action import SliceNumber


def grid(name: str, ranks: int, micro_batches: int, until: int = 28) -> str:
    """Returns three characters for each unit of time, up to time ``until``.

    ``F0`` is of a rank's first chunk and micro-batch 0, ``f0`` of its second; ``F3|b0`` is fused.
    Where sequences are cut in two, ``f0`` is of the second slice.
    """
    schedule = build(name, ranks=ranks, micro_batches=micro_batches)
    timeline = schedule.simulate()
    lines = []
    for rank, events in enumerate(timeline.events):
        first = schedule.placement.stages_of(rank)[0]
        line = ""
        for item, start, end in events:
            idle = int(start) - len(line) // 3
            line += ".  " * idle + _token(item, first).ljust(3 * int(end - start) - 1, "-") + " "
        line += ".  " * (int(timeline.makespan) - len(line) // 3)
        cut = " .." if len(line) > 3 * until else ""
        lines.append(f"rank {rank}  {line[: 3 * until].rstrip()}{cut}")
    return "\n".join(lines)


def _token(item: Item, first: int) -> str:
    if not isinstance(item, Action):
        return "|".join(_token(action, first) for action in item.actions)
    number, later = int(item.micro_batch), item.stage != first
    if isinstance(item.micro_batch, SliceNumber):
        number, later = divmod(number, item.micro_batch.slices)
    return f"{item.kind.lower() if later else item.kind}{number}"


#: For each family's file: name, p and m of the schedules that it draws.
GRIDS = {
    "f_then_b": (("FThenB", 4, 4),),
    "one_f_one_b": (("1F1B", 4, 6), ("Eager1F1B", 4, 6)),
    "k_f_k_b": (("kFkB", 3, 6),),
    "interleaved": (("Interleaved1F1B", 3, 3),),
    "zero_bubble": (("ZBH1", 4, 6), ("ZBH2", 4, 7)),
    "zbv": (("ZBV", 3, 5),),
    "controllable_memory": (("VHalf", 4, 4), ("VMin", 4, 4)),
    "dualpipev": (("DualPipeV", 3, 6),),
    "hanayo": (("Hanayo", 2, 3),),
    "seq_one_f_one_b": (("Seq1F1B", 3, 3),),
}
