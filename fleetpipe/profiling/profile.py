"""A profile as a value: the time and memory of each layer of a model, and of each link.

``model.profile(batch)`` measures one; it is stored as JSON, and a plan is computed from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fleetpipe.errors import ConfigError, PartitionError
from fleetpipe.extras import extra
from fleetpipe.json_value import JsonValue, Source, parse, read
from fleetpipe.profiling.cost_model import (
    LayerCost,
    Link,
    ProcessMemory,
    StageCost,
    Stages,
    Transfer,
    check_figure,
    check_layer,
)
from fleetpipe.profiling.splits import LayerDegrees, balanced, costs_at
from fleetpipe.representation import shows, table

#: The version of a profile's file; it rises if an older reader would misread a newer file.
VERSION = 1

#: Transfers that keep no rank busy.
_NO_TRANSFER = Transfer()
#: The link of exchanges whose time the layers' times include.
_FREE_LINK = Link(0.0, 0.0)
#: Degrees with which no ranks share experts or sequences.
_UNSPLIT = LayerDegrees()

#: The name of a layer that is a part of a vocabulary head. The loss follows the last of them.
HEAD_PART = "VocabularyPart"

_SOURCE = Source(
    "this is no profile of a model's layers",
    ConfigError,
    "write one with model.profile(batch, path), or with fleetpipe profile -o FILE SCRIPT",
)

#: The largest ``repeat`` of a layer in a file that is written by hand.
_MOST_REPEATS = 10_000


@shows("layers", "splits", "boundaries", "slice_lengths")
@dataclass(frozen=True)
class Profile:
    """A model's costs, layer by layer. Immutable; :meth:`dumps` and :meth:`loads` are inverses.

    Attributes:
        layers: The costs of its layers, in order.
        loss: The costs of the loss, which the last stage computes; None if the last layer includes
            them.
        places: The numbers of the layers with which a stage may begin, ascending, without layer 0;
            None for all layers.
        links: One for all edges between ranks, or one for each rank and the one after it, the last
            of which leads back to rank 0.
        boundaries: The cut under which it was measured; may be left out.
        transfer: The time that a crossing value keeps ranks busy.
        slices: If sequences were cut, for each slice of a micro-batch the costs of all layers, and
            last of the loss if there is one. Their parameters are ignored.
        slice_lengths: The number of positions of each of these slices.
        exchange: The link of exchanges among the ranks of a stage, which layers' times leave out.
        degrees: The number of ranks over which experts and sequences were split.
        process: The memory that a process takes for its tensors; None if unknown.

    Raises:
        ConfigError: No layer, a figure that is negative or not a number, a layer with neither B nor
            I and W, an invalid place, or slices with another number of layers.
    """

    layers: tuple[LayerCost, ...]
    loss: LayerCost | None = None
    places: tuple[int, ...] | None = None
    links: tuple[Link, ...] = (Link(),)
    boundaries: tuple[int, ...] = ()
    transfer: Transfer = _NO_TRANSFER
    slices: tuple[tuple[LayerCost, ...], ...] = ()
    slice_lengths: tuple[int, ...] = ()
    exchange: Link = _FREE_LINK
    degrees: LayerDegrees = _UNSPLIT
    process: ProcessMemory | None = None

    def __post_init__(self) -> None:
        if not self.layers or not self.links:
            raise ConfigError(
                "a profile has at least one layer and one link",
                got=f"{len(self.layers)} layers, {len(self.links)} links",
                fix="measure it with model.profile(batch)",
            )
        for number, layer in enumerate(self.layers_and_loss):
            check_layer(layer, f"layer {number} ({layer.name})")
        for link in self.links:
            for name, value in link._asdict().items():
                check_figure(name, value, "a link")
        for name, value in (*self.transfer._asdict().items(), *self.exchange._asdict().items()):
            check_figure(name, value, "a transfer or an exchange")
        for name, value in (self.process._asdict() if self.process else {}).items():
            check_figure(name, value, "the memory of a process")
        self.degrees.check()
        self._require_costs_of_slices()
        places = list(self.places or ())
        exist = all(0 < place < len(self.layers) for place in places)
        if not exist or places != sorted(set(places)):
            raise ConfigError(
                "the places of a profile are numbers of layers, rising",
                expected=f"numbers from 1 to {len(self.layers) - 1}",
                got=str(places),
                fix="leave `places` out: a stage may begin with any layer then",
            )

    def _require_costs_of_slices(self) -> None:
        """Refuses slices without the costs of all layers, or with lengths of some slices alone."""
        count = len(self.layers_and_loss)
        for index, part in enumerate(self.slices):
            for number, layer in enumerate(part):
                check_layer(layer, f"layer {number} ({layer.name}), slice {index}")
        complete = all(len(part) == count for part in self.slices)
        if not complete or len(self.slice_lengths) not in (0, len(self.slices)):
            raise ConfigError(
                "each slice has the costs of all layers, and of the loss, and a length",
                expected=f"{count} costs, {len(self.slices)} lengths",
                got=f"{[len(part) for part in self.slices]} costs,"
                f" {len(self.slice_lengths)} lengths",
                fix="measure it with model.profile(batch)",
            )

    @property
    def layers_and_loss(self) -> tuple[LayerCost, ...]:
        """The costs of all layers, and last those of the loss if it is separate."""
        return self.layers if self.loss is None else (*self.layers, self.loss)

    @property
    def cuts(self) -> tuple[int, ...]:
        """The numbers of the layers with which a stage may begin, ascending, without layer 0."""
        places = range(1, len(self.layers)) if self.places is None else self.places
        return tuple(place for place in places if place < self.body)

    @property
    def body(self) -> int:
        """The number of layers before the parts of a vocabulary head; all layers without one."""
        names = [layer.name for layer in self.layers]
        return names.index(HEAD_PART) if HEAD_PART in names else len(names)

    @property
    def splits(self) -> bool:
        """Whether I and W of every layer are known, so that schedules may split the backward."""
        return all(layer.splits for layer in self.layers)

    def require_cuts_for(self, ranks: int) -> None:
        """Refuses a number of ranks for which the model cannot be cut into as many stages.

        Args:
            ranks: Ranks of the pipeline, p.
        """
        parts = len(self.layers) - self.body - 1
        if parts > 0 and ranks != parts:
            raise ConfigError(
                "the profile is of a vocabulary head in another number of parts",
                expected=f"{parts} ranks, one for each part",
                got=f"{ranks} ranks",
                fix=f"measure the model with pp_degree={ranks}: one process can do that",
            )
        most = len(self.cuts) + 1
        if ranks > most:
            raise PartitionError(
                f"stage {most} would be empty: the model cannot be cut into {ranks} stages",
                expected=f"at most {most} ranks",
                got=f"{len(self.layers)} layers, {ranks} ranks",
                fix="use fewer ranks, or list the model's layers more finely",
            )

    def with_links(self, *links: Link, exchange: Link | None = None) -> Profile:
        """Returns this profile with other links, such as those of the machines to plan for.

        Args:
            links: One for all edges between ranks, or one from each rank to the next.
            exchange: The link of exchanges among the ranks of a stage; None for the profile's own.
        """
        return replace(self, links=links, exchange=exchange or self.exchange)

    def with_degrees(
        self, ep: int | None = None, sep: int | None = None, cp: int | None = None
    ) -> Profile:
        """Returns the model's costs if experts or sequences are split over other numbers of ranks.

        Exchanges go over the link of the profile; sequence chunks of a schedule are left out.

        Args:
            ep: Ranks that share experts; None for those of the profile.
            sep: Ranks that share sequences along sep; None for those of the profile.
            cp: Ranks that share sequences along cp; None for those of the profile.

        Raises:
            ConfigError: A degree does not divide the experts or heads of a layer, or the profile
                has no figures for them.
        """
        wanted = {"ep": ep, "sep": sep, "cp": cp}
        degrees = self.degrees._replace(**{a: n for a, n in wanted.items() if n is not None})
        if degrees == self.degrees:
            return self
        # Without a link of exchanges, the times of layers include them.
        included = self.link(0) if self.exchange == _FREE_LINK else _FREE_LINK
        costs = costs_at(self.layers_and_loss, self.degrees, degrees, self.transfer, included)
        count = len(self.layers)
        return replace(
            self,
            layers=tuple(costs[:count]),
            loss=next(iter(costs[count:]), None),
            slices=(),
            slice_lengths=(),
            exchange=self.link(0) if self.exchange == _FREE_LINK else self.exchange,
            degrees=degrees,
        )

    def link(self, rank: int) -> Link:
        """Returns the link between a rank and the next one, which is rank 0 for the last rank."""
        return self.links[rank % len(self.links)]

    def dumps(self) -> str:
        """Returns the profile as JSON; with a cut it is also a file for ``--costs``."""
        content: dict[str, Any] = {"version": VERSION, **asdict(self)}
        content["links"] = [link._asdict() for link in self.links]
        content["transfer"] = self.transfer._asdict()
        content["exchange"] = self.exchange._asdict()
        content["degrees"] = self.degrees._asdict()
        content["process"] = self.process and self.process._asdict()
        layers = _without_missing(content.pop("layers"))
        slices = list(map(_without_missing, content.pop("slices")))
        lengths = content.pop("slice_lengths")
        if slices:
            content.update(slices=slices, slice_lengths=lengths)
        return json.dumps({**self.stage_costs(), "profile": {**content, "layers": layers}}) + "\n"

    def stage_costs(self) -> dict[str, Any]:
        """Returns the figures of each stage of the measured cut, in the form of ``Costs``."""
        if not self.boundaries:
            return {}

        def figures_of(stages: Sequence[StageCost], names: Sequence[str]) -> dict[str, Any]:
            """Returns figures of stages by the names of fields of ``Costs``."""
            return {
                **{name: [getattr(stage, name) for stage in stages] for name in names},
                "comm": self.links[0].seconds(max(stage.output for stage in stages)),
                "bytes": [stage.held for stage in stages],
            }

        times = ["forward", "backward"]
        stages = self.stages.cut(self.boundaries)
        split = ["input_grad", "weight_grad"] if self.splits else []
        waits = ["exchange"] if any(stage.exchange for stage in stages) else []
        figures = figures_of(stages, [*times, *split, *waits])
        if self.slices:
            slices = [one.cut(self.boundaries) for one in self.stages_of_slices]
            figures["each_slice"] = [figures_of(stages, times) for stages in slices]
        return figures

    @property
    def stages(self) -> Stages:
        """The costs of any stage that consists of successive layers, exchanges included."""
        return Stages(self.layers, self.loss, self.exchange)

    @property
    def stages_of_slices(self) -> tuple[Stages, ...]:
        """For each slice of a micro-batch the costs of any stage; empty without slices."""
        count = len(self.layers)
        return tuple(Stages(part[:count], next(iter(part[count:]), None)) for part in self.slices)

    def balanced_slices(self, slices: int | None = None) -> tuple[int, ...]:
        """Returns lengths of slices with equal costs: ``fleetpipe_configs["slices"]``.

        A later position attends to more positions. So the time of a slice is fitted as a sum of two
        parts: one is proportional to its positions, the other to the positions they attend to.

        Args:
            slices: Number of slices; None for as many as were measured.

        Raises:
            ConfigError: Fewer than two slices were measured, or there are not as many places.
        """
        times = [sum(layer.forward + layer.whole for layer in part) for part in self.slices]
        if len(times) < 2 or not self.slice_lengths:
            raise ConfigError(
                "the costs of slices are not known",
                expected="a profile of a model that is trained with two slices or more",
                fix='set schedule_mode="Seq1F1B" and profile the model anew',
            )
        return balanced(self.slice_lengths, times, slices or len(times))

    def __getitem__(self, name: str) -> Any:
        """Returns a figure of each stage of the measured cut: ``profile["forward"]``."""
        return self.stage_costs()[name]

    @classmethod
    def loads(cls, text: str) -> Profile:
        """Reads JSON from :meth:`dumps`, or ``{"profile": {"layers": [..]}}`` written by hand.

        By hand, a layer needs ``name``, ``forward`` and ``backward`` (or ``input_grad`` and
        ``weight_grad``); other figures default to 0, and ``"repeat": n`` means n such layers.

        Raises:
            ConfigError: It is not a profile, of a newer version, or incomplete.
        """
        return cls.of(parse(text, _SOURCE))

    @classmethod
    def of(cls, content: JsonValue) -> Profile:
        """Reads a profile from the contents of a file; raises the errors of :meth:`loads`."""
        entry = content["profile"]
        version = entry.get("version")
        if version is not None and version.content != VERSION:
            raise version.refused(f"version {VERSION}")
        there = {n: v.content for n, v in entry.fields().items() if v.content is not None}
        there.pop("version", None)
        return JsonValue(there, entry.source, entry.place).record(cls, **_READERS)

    def write(self, path: str | Path) -> None:
        """Writes the profile to a file, as JSON."""
        Path(path).write_text(self.dumps(), encoding="utf-8")

    def plot(self, path: str | Path) -> None:
        """Draws the costs of each layer, and of the loss if it is separate.

        Args:
            path: File to write: .png, .svg or .pdf.

        Raises:
            ConfigError: Another ending.
            PackageNotFound: matplotlib is not installed.
        """
        extra("pictures.picture").draw_layers(self.layers_and_loss, path)

    @classmethod
    def read(cls, path: str | Path) -> Profile:
        """Reads a file from :meth:`write`.

        Raises:
            ConfigError: The errors of :meth:`loads`, or there is no such file.
        """
        return read(path, _SOURCE, cls.of)

    def __str__(self) -> str:
        """A table: milliseconds of F, B, I and W, and bytes, of each layer."""
        head = ("layer", "name", "F ms", "B ms", "I ms", "W ms", "parameters", "output", "held")
        exchanges = any(layer.exchanges for layer in self.layers)
        rows: list[tuple[str, ...]] = [(*head, *(("exchanged",) if exchanges else ()))]
        for number, layer in enumerate(self.layers_and_loss):
            times = (layer.forward, layer.whole, layer.input_grad, layer.weight_grad)
            rows.append(
                (
                    str(number) if number < len(self.layers) else "loss",
                    layer.name,
                    *("-" if time is None else f"{1e3 * time:.3f}" for time in times),
                    *(f"{size:,}" for size in (layer.parameters, layer.output, layer.held)),
                    *((f"{layer.exchanged:,}",) if exchanges else ()),
                )
            )
        return table(rows, left=(1,))


def _without_missing(layers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the dict of each layer without the figures that are None."""
    return [{n: value for n, value in layer.items() if value is not None} for layer in layers]


def _read_layers(entry: JsonValue) -> list[LayerCost]:
    """Reads an item of the list of layers, which stands for ``repeat`` equal layers."""
    values = entry.fields()
    repeat = values.pop("repeat", None)
    times = 1 if repeat is None else repeat.count()
    if repeat is not None and not 1 <= times <= _MOST_REPEATS:
        raise repeat.refused(f"a whole number of 1 to {_MOST_REPEATS}")
    plain = {name: value.content for name, value in values.items()}
    return [_read_layer(JsonValue(plain, entry.source, entry.place))] * times


def _read_layer(entry: JsonValue) -> LayerCost:
    """Reads the JSON object of one layer, whose keys are the fields of ``LayerCost``."""
    readers: Any = {
        "name": JsonValue.text,
        "heads": JsonValue.counts,
        "loads": lambda value: tuple(map(JsonValue.counts, value.items())),
    }
    return entry.record(LayerCost, JsonValue.figure, **readers)


def _read_link(entry: JsonValue) -> Link:
    """Reads the JSON object of a link, whose keys are the fields of ``Link``."""
    return entry.record(Link, JsonValue.figure)


#: By attribute of a profile, the function that reads its value.
_READERS: Any = {
    "layers": lambda value: tuple(
        layer for entry in value.items() for layer in _read_layers(entry)
    ),
    "loss": _read_layer,
    "places": JsonValue.counts,
    "links": lambda value: tuple(map(_read_link, value.items())) or (Link(),),
    "boundaries": JsonValue.counts,
    "transfer": lambda value: value.record(Transfer, JsonValue.figure),
    "slices": lambda value: tuple(tuple(map(_read_layer, part.items())) for part in value.items()),
    "slice_lengths": JsonValue.counts,
    "exchange": _read_link,
    "degrees": lambda value: value.record(LayerDegrees, JsonValue.count),
    "process": lambda value: value.record(ProcessMemory, JsonValue.figure),
}
