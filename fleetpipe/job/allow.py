"""What passes a closed border without being in its table: what the script allows by name.

A border takes what a table knows to be right, with the reason for each row. All else is refused
before the first batch, in an error that has the line that lets it pass. What was let pass stands in
the run's report, in parity's verdict and in the manifest of a checkpoint.
"""

from __future__ import annotations

from typing import Any

from fleetpipe import log
from fleetpipe.errors import ConfigError

_log = log.logger(__name__)


class Allow:
    """The entries of the option ``allow``, and which of them something was let pass by.

    Attributes:
        entries: As ``BORDER:NAME``.
        used: By entry, the rule that was not applied.
    """

    def __init__(self, entries: tuple[str, ...] = ()) -> None:
        """Starts with nothing let pass."""
        self.entries = entries
        self.used: dict[str, str] = {}

    def refuse(self, border: str, name: str, rule: str, *, fix: str, **facts: Any) -> None:
        """Refuses what a border's table does not have, or notes that the script allows it.

        Args:
            border: One of those that the option ``allow`` takes.
            name: Of the thing, as its class or function is called.
            rule: What is refused, in one sentence, as the summary of an error.
            fix: What to use in its place; the line that lets it pass is added.
            facts: Further lines of the error; what it got is the name by default.

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
