"""Picks the reader of a program by the IR it is written in."""

from __future__ import annotations

from typing import Any

from fleetpipe.static._paddle import is_pir
from fleetpipe.static.cut.contract import Reader


def read(program: Any) -> Reader:
    """Returns the reader of a forward program, of PIR or of the older kind."""
    if is_pir(program):
        from fleetpipe.static.ir.pir.reader import PirReader

        return PirReader(program)
    from fleetpipe.static.ir.program.reader import ProgramReader

    return ProgramReader(program)
