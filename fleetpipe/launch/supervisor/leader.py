"""The supervisor that decides which hosts take part in a life, and whether there is another."""

from __future__ import annotations

import argparse
import functools
import secrets
import selectors
import signal
import socket
import time
from dataclasses import replace
from typing import Any, NamedTuple

from fleetpipe.job import life
from fleetpipe.launch.keeping.copies import Copies
from fleetpipe.launch.keeping.places import Claim, gifts, placed
from fleetpipe.launch.keeping.rounds import Rounds
from fleetpipe.launch.keeping.slots import Stamp
from fleetpipe.launch.script import in_a_shell
from fleetpipe.launch.supervisor import saying
from fleetpipe.launch.supervisor.door import Door
from fleetpipe.launch.supervisor.link import Link, Message
from fleetpipe.launch.supervisor.local import Local, Place
from fleetpipe.launch.supervisor.signals import BREAK_SIGNALS, Signals
from fleetpipe.launch.supervisor.verdict import POISONED, Verdict, joint

#: Seconds that ranks on other hosts may take to end by themselves after one has failed.
END_SECONDS = 8.0
#: Seconds in which further hosts may come once there are enough.
SETTLE_SECONDS = 5.0
_TURN_SECONDS = 1.0
_MARK_BITS = 48


class Host(NamedTuple):
    """A host that follows, as its supervisor says.

    Attributes:
        address: Of it.
        port: Where it takes copies of states; 0: it does not.
        claim: Where it was in the last life in which it took part.
    """

    address: str
    port: int
    claim: Claim


class Leader:
    """One job, from its first life to its last, on this host and on those that follow it."""

    def __init__(
        self,
        options: argparse.Namespace,
        local: Local,
        signals: Signals,
        listener: socket.socket | None = None,
        copies: Copies | None = None,
    ) -> None:
        """Leads.

        Args:
            options: Of the command.
            local: This host's ranks.
            signals: What asks the job to stop.
            listener: Where other hosts come to; None where there are none.
            copies: This host's part in the copies of states; None where there are none.
        """
        self._options = options
        self._local = local
        self._signals = signals
        self._host = options.master[0] if listener is not None else ""
        self._selector = selectors.DefaultSelector()
        self._copies = copies
        self._rounds: Rounds | None = None
        #: The places of hosts that are giving back what they have of others.
        self._giving: set[int] = set()
        #: Supervisors that follow, and what those have said of themselves that have.
        self._links: dict[Link, Host | None] = {}
        self._door: Door | None = None
        self._taking_part: list[Link] = []
        self._running: set[Link] = set()
        self._verdicts: list[Verdict] = []
        self._number = 0
        self._restarts = 0
        self._stopped_by: int | None = None
        self._grows = False
        self._deadline: float | None = None
        self._selector.register(signals, selectors.EVENT_READ, self._take_signals)
        if copies is not None:
            self._selector.register(copies, selectors.EVENT_READ, self._take_news)
        if listener is not None:
            self._door = Door(listener, self._selector, self._let_in)

    def run(self) -> int:
        """Runs one life after another; returns the exit code of the job."""
        code = 1
        try:
            code = self._run()
        finally:
            for each in self._links:
                each.tell("over", code=code)
                each.close()
            self._selector.close()
        return code

    @property
    def _hosts(self) -> dict[Link, Host]:
        """The other hosts that are here."""
        return {each: host for each, host in self._links.items() if host is not None}

    def _run(self) -> int:
        last = None
        while self._gather():
            if not self._prepare():
                continue
            verdict = self._live()
            if self._interrupted and (verdict.code or verdict.saved is not None):
                verdict = replace(verdict, code=life.INTERRUPTED, culprit="interrupted", details="")
            if verdict.code or verdict.saved is not None:
                self._local.record(self._number, verdict)
            if verdict.saved is not None and self._grows:
                saying.say(f"{verdict.saved} steps are saved, and a host has come")
                continue
            code = self._settled(verdict, last)
            if code is not None:
                return code
            last = verdict
            self._restarts += 1
            of = f"restart {self._restarts} of {self._options.max_restart}"
            saying.say(f"life {self._number + 1} begins: {of}")
        if self._stopped_by is None:
            saying.say(f"fewer than {self._options.nnodes[0]} hosts are here: the job has failed")
            return 1
        return in_a_shell(-self._stopped_by)

    def _settled(self, verdict: Verdict, last: Verdict | None) -> int | None:
        """Returns the exit code of a job that is not to be started again; else None."""
        if verdict.code == life.INTERRUPTED and self._interrupted:
            saved = "" if verdict.saved is None else f", the job saved {verdict.saved} steps"
            saying.say(f"interrupted{saved}")
            return life.INTERRUPTED
        if verdict.saved is not None:
            saying.say(f"asked to stop, the job saved {verdict.saved} steps and ended")
            return life.PREEMPTED
        if verdict.code == 0:
            return 0
        saying.say(saying.account(self._number, verdict))
        if self._stopped_by is not None:
            return in_a_shell(-self._stopped_by)
        if last is not None and verdict.repeats(last):
            saying.say(saying.poison(verdict))
            poisoned = verdict.step is not None and not verdict.disk_full
            return POISONED if poisoned else verdict.code
        if self._restarts == self._options.max_restart:
            saying.say(f"all {self._restarts} restarts are used: the job has failed")
            return verdict.code
        return None

    def _gather(self) -> bool:
        """Waits until there are hosts for a life; returns whether there are enough of them."""
        least: int = self._options.nnodes[0]
        most: int = self._options.nnodes[1]
        begun = changed = time.monotonic()
        there = 0
        while self._stopped_by is None:
            if there != len(self._hosts) + 1:
                there, changed = len(self._hosts) + 1, time.monotonic()
            now = time.monotonic()
            same = there == len(self._taking_part) + 1 and self._number > 0
            if there >= most or (there >= least and (same or now - changed > SETTLE_SECONDS)):
                return True
            if now - begun > self._options.elastic_timeout:
                return there >= least
            self._turn()
        return False

    def _prepare(self) -> bool:
        """Gives each host its place, and one that has lost its memory what others have of it.

        Returns:
            Whether all of them are still there.
        """
        hosts = self._hosts
        links, claims = [*hosts], [host.claim for host in hosts.values()]
        nodes = min(len(links) + 1, self._options.nnodes[1])
        self._taking_part = [links[host] for host in placed(claims, nodes)]
        self._number = 1 + max(self._number, *(claim.life for claim in [Claim(), *claims]))
        own = self._local.claim
        ring = [own, *(hosts[each].claim for each in self._taking_part)] if self._ring() else []
        for giver, node, held, kept in gifts(ring):
            if held:
                self._command(node, "expect", life=self._number, nodes=nodes, node=node)
            to = self._ring()[node]
            self._command(giver, "give", life=self._number, to=to, held=held, kept=kept)
            self._giving.add(giver)
        while self._giving and self._stopped_by is None:
            self._turn()
        self._giving.clear()
        return self._stopped_by is None and all(each in self._links for each in self._taking_part)

    def _ring(self) -> list[str]:
        """Where the hosts of a life take copies, by place; empty where not all of them do."""
        others = [self._links[each] for each in self._taking_part]
        if self._copies is None or not others or not all(host and host.port for host in others):
            return []
        return [self._copies.where, *(f"{host.address}:{host.port}" for host in others if host)]

    def _command(self, whom: int, kind: str, **fields: Any) -> None:
        """Has a host do something with copies."""
        if whom:
            self._taking_part[whom - 1].tell(kind, **fields)
        elif self._copies is not None:
            self._copies.obey({"kind": kind, **fields})

    def _live(self) -> Verdict:
        """Runs one life to its end on all hosts."""
        self._verdicts, self._deadline, self._grows = [], None, False
        nodes, ring = len(self._taking_part) + 1, self._ring()
        place = Place(self._number, nodes)
        if nodes > 1:
            place = place._replace(master=f"{self._host}:{_free_port(self._host)}")
        if ring:
            place = place._replace(mark=secrets.randbits(_MARK_BITS), neighbour=ring[1])
            self._rounds = Rounds(place.mark, nodes, self._options.neighbour_every)
        for node, each in enumerate(self._taking_part, 1):
            neighbour = ring[(node + 1) % nodes] if ring else ""
            each.tell("begin", **place._replace(node=node, neighbour=neighbour)._asdict())
            host = self._links[each]
            if host is not None:
                claim = Claim(self._number, nodes, node)
                self._links[each] = host._replace(claim=claim)
        self._running = set(self._taking_part)
        self._local.start(place)
        self._selector.register(self._local, selectors.EVENT_READ, self._end)
        while self._local.running or self._running:
            self._turn()
            self._kill_if_late()
        self._rounds = None
        return joint(self._verdicts)

    def _turn(self) -> None:
        """Waits for what comes next, and does what it asks for."""
        left = _TURN_SECONDS
        if self._deadline is not None:
            left = max(0.0, min(left, self._deadline - time.monotonic()))
        for key, _ in self._selector.select(left):
            key.data()
        if self._door is not None:
            self._door.drop_late()
        for each in list(self._links):
            each.say_alive()
            if each.lost:
                self._lose(each)
        self._grow()
        self._copy()

    def _end(self) -> None:
        # The next life may have another process to start it.
        self._selector.unregister(self._local)
        self._ended(self._local.end())

    def _take_signals(self) -> None:
        for number in self._signals.take():
            self._asked(number)

    def _hear(self, who: Link) -> None:
        try:
            for message in who.hear():
                self._heard(who, message)
        except ValueError:
            self._lose(who)

    def _heard(self, who: Link, message: Message) -> None:
        if message["kind"] == "here":
            claim = Claim(**{name: message[name] for name in Claim._fields})
            self._links[who] = Host(message["address"], message["port"], claim)
        elif message["kind"] == "asked":
            self._asked(message["number"])
        elif message["kind"] == "ended" and message["life"] == self._number:
            self._running.discard(who)
            self._ended(Verdict.parse(message["verdict"]))
        elif who in self._taking_part:
            self._told(self._taking_part.index(who) + 1, message)

    def _take_news(self) -> None:
        for message in self._copies.news() if self._copies is not None else ():
            self._told(0, message)

    def _told(self, node: int, message: Message) -> None:
        """Takes note of what a host has done with copies."""
        if message["kind"] == "gave":
            self._giving.discard(node)
        elif message["kind"] == "mirrored" and message["life"] == self._number and self._rounds:
            self._rounds.told(node, message["step"], message["outcome"])

    def _ended(self, verdict: Verdict) -> None:
        """Takes note of how the life ended on a host; where it failed, it ends on the others."""
        self._verdicts.append(verdict)
        if verdict.code:
            soon = time.monotonic() + END_SECONDS
            self._deadline = soon if self._deadline is None else min(soon, self._deadline)

    def _asked(self, number: int) -> None:
        """Has the ranks of all hosts save and end, or just end."""
        again, self._stopped_by = self._stopped_by, self._stopped_by or number
        if number in BREAK_SIGNALS and again is not None:
            self._deadline = time.monotonic()
        elif self._deadline is None:
            if self._interrupted:
                saying.say("interrupted: the step is finished and saved; once more ends it at once")
            self._stop(number)

    @property
    def _interrupted(self) -> bool:
        return self._stopped_by in BREAK_SIGNALS

    def _stop(self, number: int = signal.SIGTERM) -> None:
        self._deadline = time.monotonic() + self._options.grace
        self._local.stop(number)
        for each in self._running:
            each.tell("stop")

    def _kill_if_late(self) -> None:
        if self._deadline is None or time.monotonic() < self._deadline:
            return
        self._deadline = None
        self._local.kill()
        for each in self._running:
            each.tell("kill")

    def _grow(self) -> None:
        """Ends a life that has fewer hosts than it might have, after a step that is saved."""
        most = min(self._options.nnodes[1] - 1, len(self._hosts))
        grows = len(self._taking_part) < most and self._deadline is None
        # Before its first step a rank does not save when it is asked to stop.
        if grows and self._local.step is not None:
            self._grows = True
            self._stop()

    def _copy(self) -> None:
        """Begins a round of copies to the neighbours, where none is on."""
        step = self._local.step
        if self._rounds is None or step is None or self._deadline is not None:
            return
        state, safe = self._rounds.due(step), self._rounds.safe or Stamp(0, 0)
        if state is not None:
            told = {"step": state.step, "safe_life": safe.life, "safe_step": safe.step}
            for node in range(len(self._taking_part) + 1):
                self._command(node, "mirror", life=self._number, **told)

    def _lose(self, who: Link) -> None:
        """Does without a host that is gone, or cannot be reached."""
        host = self._links.pop(who)
        self._selector.unregister(who)
        who.close()
        if who in self._taking_part:
            self._giving.discard(self._taking_part.index(who) + 1)
        if who in self._running:
            self._running.discard(who)
            address = "" if host is None else host.address
            gone = f"host {address} is gone: its supervisor ended, or cannot be reached"
            self._ended(Verdict(1, culprit=gone, gone=True))

    def _let_in(self, link: Link) -> None:
        self._selector.register(link, selectors.EVENT_READ, functools.partial(self._hear, link))
        self._links[link] = None


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
