"""What each rank trains on in its last steps, by which a process that replaces it is checked.

A script may hold its place in the data, or a generator of its own, where nothing restores it: then
a process that runs it anew has another batch than the rank that it replaces had.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fleetpipe import atomic_file
from fleetpipe.job import attempt_files

#: Digests of inputs, of labels, and of random states, learning rate and the like before a batch.
Record = list[int | None]
#: The records of all ranks: by rank, by step.
Records = Mapping[int, Mapping[int, Record]]


def record_of(batch: Any, before: Any, generators: Any) -> Record:
    """Returns the record of a ``TrainingBatch`` that has not run.

    Args:
        batch: The batch, or a ``ProgramBatch``.
        before: What is neither tensor nor data, before it was drawn.
        generators: The states of Paddle's generators after the step before, which is kept. Where
            they are the same, ranks are alike: a static program draws on some of them alone.
    """
    # From NumPy's and Python's generators come rows, if anything, which have digests.
    left_out = {"numpy", "python", "program"}  # those of a program's stages are the rank's own
    left_out |= {"paddle"} if before["random"]["paddle"] == generators else set()
    random = {k: v for k, v in before["random"].items() if k not in left_out}
    # What objects look like is compared by name.
    text = repr({**before, "random": random, "attributes": None})
    return [*batch.digests, zlib.crc32(text.encode())]


def write(home: Path, step: int, record: Record) -> None:
    """Writes this rank's record of a step beside that of the step before."""
    file = home / f"batch.{attempt_files.own_rank()}"
    earlier = _steps(file)
    before = _before(earlier, step)
    kept = {} if before is None else {before: earlier[before]}
    with atomic_file.draft_of(file) as draft:
        draft.write_text(json.dumps({**kept, step: record}), encoding="ascii")


def read(home: Path) -> Records:
    """Returns the records of all ranks of this host."""
    return {int(f.suffix[1:]): _steps(f) for f in home.glob("batch.*") if f.suffix[1:].isdecimal()}


def find_record(earlier: Records, now: Mapping[int, Record], rank: int, step: int) -> Record | None:
    """Returns what a rank had in a step; None where that cannot be told.

    Where it had not come to the step, it is what ranks have that had the same in the step before:
    the same inputs, labels, random states.

    Args:
        earlier: The records of all ranks.
        now: What the others have in the step.
        rank: The rank.
        step: The number of steps before.
    """
    here = earlier.get(rank, {})
    before = _before(here, step)
    if step in here or before is None:
        return here.get(step)
    fields: Record = []
    for field, value in enumerate(here[before]):
        then = ((one, earlier.get(one, {}).get(before)) for one in now)
        alike = [now[one][field] for one, record in then if record and record[field] == value]
        if value is not None and not alike:
            return None
        fields.append(None if value is None else alike[0])
    return fields


def _before(steps: Mapping[int, Record], step: int) -> int | None:
    return max((one for one in steps if one < step), default=None)


def _steps(file: Path) -> dict[int, Record]:
    if not file.exists():
        return {}
    return {int(step): row for step, row in json.loads(file.read_text(encoding="ascii")).items()}
