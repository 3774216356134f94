"""The option ``allow``: lets a script use classes and functions that are not known to be right.

A border is a kind of thing that a user passes in, such as an optimizer, with a table of what is
known to be right. Anything else is refused before the first batch, by an error that contains the
line which allows it. Entries that were used are named in the run's report, in parity's verdict and
in a checkpoint's manifest.
"""

from __future__ import annotations

from typing import Any

from fleetpipe import log
from fleetpipe.errors import ConfigError

_log = log.logger(__name__)


class Allow:
    """The entries of the option ``allow``, and which of them were used.

    Attributes:
        entries: What the script allows, each as ``KIND:NAME``, such as ``optimizer:MySAM``.
        used: For each entry that was needed, the rule that was not applied.
    """

    def __init__(self, entries: tuple[str, ...] = ()) -> None:
        """Stores the entries of the option; none is used yet."""
        self.entries = entries
        self.used: dict[str, str] = {}

    def refuse(self, border: str, name: str, rule: str, *, fix: str, **facts: Any) -> None:
        """Refuses a class or function not known to be right, unless the script allows it.

        Args:
            border: The kind of the class or function, such as "optimizer".
            name: The name of the class or function.
            rule: What is refused, in one sentence: the summary of the error.
            fix: What to use instead; the line that allows the name is added.
            facts: Further lines of the error; ``got`` is the name by default.

        Raises:
            ConfigError: The script does not allow it.
        """
        entry = f"{border}:{name}"
        if entry in self.entries:
            self.used.setdefault(entry, rule)
            log.once(_log.warning, f"allowed by fleetpipe_configs: {entry}: {rule}")
            return
        line = f"strategy.fleetpipe_configs = {{'allow': [{entry!r}]}}"
        fix = f"{fix}; or, where you know that it is right, {line}"
        raise ConfigError(rule, **{"got": name, **facts}, fix=fix)
