"""Paddle's two representations of programs: PIR (3.3) and ``program_ir`` (2.6.2), an extra.

:func:`read` chooses the reader of a program, which describes the program. Each representation also
has a stage, which builds the native programs of a stage; ``backward.py`` is common to both. This
package imports the cut, but nothing that runs programs.
"""

from __future__ import annotations

from fleetpipe.aliases import Program, Variable
from fleetpipe.extras import extra
from fleetpipe.paddle_api.static import is_pir
from fleetpipe.static.cut import GraphReader


def read(program: Program) -> GraphReader:
    """Returns the reader of a forward program, of PIR or of the older kind."""
    if is_pir(program):
        from fleetpipe.static.ir.pir_reader import PirReader

        return PirReader(program)
    reader: GraphReader = extra("program_ir.program_reader").ProgramReader(program)
    return reader


def name_of(value: Variable) -> str:
    """Returns a value's name for ``recompute_configs`` and ``fetch_list``, the same on all ranks.

    In the older Program each value has a name, ``value.name``. Under PIR only data and parameters
    have names, and this function gives the value a name.

    Args:
        value: A value of a static program, before ``minimize``.
    """
    if hasattr(value, "get_defining_op"):
        from fleetpipe.static.ir.pir_reader import give_name

        return give_name(value)
    return str(value.name)
