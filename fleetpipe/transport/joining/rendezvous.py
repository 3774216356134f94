"""How ranks find each other: each publishes a card in the job's store and reads the others'.

A store's ``get`` of a key that is not there yet may block for ever, so each card has a counter
next to it that is polled until the deadline, and only a card that is there is read.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping

from fleetpipe.errors import PipelineTimeout, TransportError
from fleetpipe.transport.base import Store
from fleetpipe.transport.limit import Limit, await_keys
from fleetpipe.transport.wire.message import VERSION
from fleetpipe.transport.wire.parsing import parse

_LARGEST_CARD = 1 << 16


class Rendezvous:
    """One rank's view of the place in the store where the ranks of a pipeline meet."""

    def __init__(self, store: Store, namespace: str, rank: int, ranks: int, timeout: float) -> None:
        """Enters ``namespace`` as ``rank``.

        Args:
            store: The job's store.
            namespace: Prefix of all keys, new in this store.
            rank: This rank.
            ranks: Ranks that meet.
            timeout: Seconds from now that everything here may take in sum.

        Raises:
            TransportError: This rank has entered the namespace before.
        """
        self.rank = rank
        self.ranks = ranks
        self.timeout = timeout
        self.limit = Limit(timeout)
        self._store = store
        self._namespace = namespace
        if store.add(f"{namespace}/{rank}/entered", 1) != 1:
            raise TransportError(
                f"rank {rank} entered the namespace {namespace!r} twice",
                cause="two processes have one rank, or a namespace of an earlier connection "
                "is used again",
                fix="give each process its own rank and each connection its own namespace",
            )

    def publish(self, subject: str, card: Mapping[str, str]) -> None:
        """Makes this rank's ``card`` about ``subject`` known to the others."""
        key = f"{self._namespace}/{self.rank}/{subject}"
        text = {"version": VERSION, "ranks": self.ranks, **card}
        self._store.set(key, json.dumps(text))
        self._store.add(f"{key}/ready", 1)

    def gather(
        self, subject: str, ranks: Iterable[int], names: Collection[str]
    ) -> dict[int, dict[str, str]]:
        """Returns the cards of ``ranks`` about ``subject``, waiting until all are there.

        Raises:
            PipelineTimeout: Some are not there at the limit; the message says whose.
            TransportError: A card is none, from another version or for another number of ranks.
        """
        keys = {rank: f"{self._namespace}/{rank}/{subject}" for rank in ranks}
        counters = {rank: f"{key}/ready" for rank, key in keys.items()}
        arriving = await_keys(
            self._store, counters, self.limit, lambda missing, _: self.late(missing)
        )
        return {rank: self._read(rank, keys[rank], names) for rank in arriving}

    def late(self, missing: Iterable[int]) -> PipelineTimeout:
        """Returns the error that names the ranks that did not arrive."""
        names = ", ".join(str(rank) for rank in sorted(missing))
        return PipelineTimeout(
            f"rank {self.rank} waited {self.timeout:g} s for rank(s) {names} to connect",
            where=f"connecting the {self.ranks} ranks of {self._namespace!r}",
            expected=f"all ranks from 0 to {self.ranks - 1} to call connect()",
            cause=f"rank(s) {names} failed before, are still starting, or cannot be reached",
            fix=f"read the log of rank(s) {names}; raise the timeout if they only start slowly",
        )

    def _read(self, rank: int, key: str, names: Collection[str]) -> dict[str, str]:
        text = self._store.get(key)
        try:
            card = parse(text[:_LARGEST_CARD], 1, 1, 16)
            fits = (card.pop("version"), card.pop("ranks"))
            if not all(type(card[name]) is str for name in names):
                raise ValueError("not all of it is text")
        except (ValueError, LookupError, AttributeError, TypeError) as error:
            raise TransportError(
                f"what the store holds as the card of rank {rank} is none",
                expected=f"a JSON object with the texts {', '.join(names)}",
                got=f"{text[:200]!r} ({str(error)[:200]})",
                cause="another program wrote into the job's store",
                fix="launch again; with another --master HOST:PORT if that happens twice",
            ) from None
        if fits != (VERSION, self.ranks):
            raise TransportError(
                f"rank {rank} and rank {self.rank} do not fit together",
                expected=f"version {VERSION} of the transport and {self.ranks} ranks",
                got=f"version {fits[0]} and {fits[1]} ranks",
                fix="start all ranks with the same fleetpipe and the same pp_degree",
            )
        return dict(card)
