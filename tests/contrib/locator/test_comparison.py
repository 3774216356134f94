"""A job beside its twin, both written by hand: what is named, and what is no difference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fleetpipe.contrib.locator import Location, record
from fleetpipe.contrib.locator.locate_command import first_difference
from fleetpipe.contrib.locator.record import RankTensors, Record, TensorKey
from fleetpipe.errors import UsageError

#: Changes what ranks have.
Change = Callable[[list[RankTensors]], None]
WEIGHT = np.arange(1.0, 7.0, dtype="float32").reshape(3, 2)
ROWS = np.arange(12.0, dtype="float32").reshape(4, 3)
ROUNDING = np.float32(1 + 2**-23)

INITIAL = TensorKey(0, "initial", "fc.weight", role="parameter")
OUTPUT = TensorKey(0, "forward", "fc", 0, "output 0")
SHARE = TensorKey(0, "loss", "", 0, "share")
LOCAL = TensorKey(0, "gradient", "fc.weight", role="gradient")
TOTAL = LOCAL._replace(phase="reduction")
CLIPPED = LOCAL._replace(phase="clip")
RATE = TensorKey(0, "optimizer input", "", role="learning rate")
LISTED = RATE._replace(role="parameters")
UPDATE = INITIAL._replace(phase="update")
READ_ON = TensorKey(0, "data", "", role=record.READ_ON)


def one_rank(rank: int, coordinate: dict[str, int], rows: np.ndarray) -> RankTensors:
    """Returns a step of ``rows @ WEIGHT`` in one micro-batch."""
    outputs = rows @ WEIGHT
    gradient = np.full_like(outputs, 1 / outputs.size)
    total = ROWS.T @ np.full([4, 2], 1 / 8, "float32")
    here = RankTensors(rank, coordinate)
    here.tensors = {
        INITIAL: WEIGHT,
        TensorKey(0, "data", "", 0, "input"): rows,
        OUTPUT: outputs,
        SHARE: np.asarray(np.float32(outputs.mean())),
        OUTPUT._replace(phase="gradient"): gradient,
        LOCAL: rows.T @ gradient,
        TOTAL: total,
        RATE: np.asarray(np.float64(0.1)),
        LISTED: np.frombuffer(b'["fc.weight"]', "uint8"),
        UPDATE: WEIGHT - np.float32(0.1) * total,
    }
    return here


def replicas(*changes: Change) -> list[RankTensors]:
    """Returns two replicas, each of which has two of four rows."""
    ranks = [one_rank(rank, {"dp": rank}, ROWS[2 * rank : 2 * rank + 2]) for rank in (0, 1)]
    for change in changes:
        change(ranks)
    return ranks


def twin(*changes: Change, factor: float | np.float32 = 1.0) -> list[RankTensors]:
    """Returns the one rank of the twin, with numbers that are ``factor`` times what they are."""
    single = one_rank(0, {}, ROWS)
    floats = {p: t for p, t in single.tensors.items() if p.phase != "data"}
    single.tensors.update({p: (t * factor).astype(t.dtype) for p, t in floats.items()})
    for change in changes:
        change([single])
    return [single]


def named(
    job: list[RankTensors],
    single: list[RankTensors] | None = None,
    moved: list[RankTensors] | None = None,
    axis: str = "dp",
) -> Location | None:
    """Returns the place that is named; ``moved`` is the twin again where there is one."""
    plain = twin() if single is None else single
    again = moved or (twin(factor=ROUNDING) if single is None else single)
    return first_difference(Record(job, {axis: len(job)}), Record(plain, {}), Record(again, {}))


def scaled(phase: str, part: str, factor: float, rank: int | None = None) -> Change:
    def change(ranks: list[RankTensors]) -> None:
        for here in ranks if rank is None else [ranks[rank]]:
            for place in here.tensors:
                if place.phase == phase and place.role == part:
                    value = here.tensors[place]
                    here.tensors[place] = (value * factor).astype(value.dtype)

    return change


def with_copy(source: TensorKey, place: TensorKey, rank: int = -1) -> Change:
    """Gives one rank a tensor in another place too."""

    def change(ranks: list[RankTensors]) -> None:
        ranks[rank].tensors[place] = ranks[rank].tensors[source]

    return change


def without(*places: tuple[str, str]) -> Change:
    """Takes the tensors of some phases and names from the last rank."""

    def change(ranks: list[RankTensors]) -> None:
        held = ranks[-1].tensors.items()
        ranks[-1].tensors = {p: t for p, t in held if (p.phase, p.name) not in places}

    return change


def same_rows(ranks: list[RankTensors]) -> None:
    ranks[1].tensors = dict(ranks[0].tensors)


def not_reduced(ranks: list[RankTensors]) -> None:
    for rank in ranks:
        rank.tensors[TOTAL] = rank.tensors[LOCAL] / 2


left_over = with_copy(TOTAL, LOCAL._replace(role=record.LEFT))
first_clips = with_copy(TOTAL, CLIPPED, 0)


def rows_by(order: Callable[[int], np.ndarray]) -> Change:
    """Gives each replica the rows that ``order`` says of its number."""

    def change(ranks: list[RankTensors]) -> None:
        ranks[:] = [one_rank(rank, {"dp": rank}, order(rank)) for rank in (0, 1)]

    return change


@pytest.mark.parametrize(
    ("of_job", "of_twin"),
    [
        ((), ()),
        ((rows_by(lambda rank: ROWS[1 - rank :: 2]),), ()),
        # Where all replicas have another order of rows, the twin has its order by chance.
        ((rows_by(lambda rank: ROWS[2 * rank : 2 * rank + 2][::-1]),), ()),
        ((left_over,), (left_over,)),
        # A shard without a parameter: others step for it.
        ((first_clips, without(("optimizer input", ""))), (first_clips,)),
        # By hand before the step.
        ((scaled("reduction", "gradient", 0.3),), (scaled("reduction", "gradient", 0.3),)),
        ((scaled("forward", "output 0", float(ROUNDING), 1),), ()),
    ],
)
def test_what_is_no_difference(of_job: tuple[Change, ...], of_twin: tuple[Change, ...]) -> None:
    moved = twin(*of_twin, factor=ROUNDING)
    assert named(replicas(*of_job), twin(*of_twin), moved) is None


@pytest.mark.parametrize(
    ("change", "layer", "phase", "axis", "ranks", "words"),
    [
        (same_rows, "", "data", "dp", [1], "does not know of the replicas"),
        (
            *(rows_by(lambda rank: ROWS[2 * rank : 2 * rank + 2][:: 1 - 2 * rank]), "", "data"),
            *("dp", [1], "in another order"),
        ),
        (
            *(rows_by(lambda rank: ROWS[2 * rank : 2 * rank + 2][:: 2 * rank - 1]), "", "data"),
            *("dp", [0], "in another order"),
        ),
        (rows_by(lambda rank: ROWS[:2] + 50 * rank), "", "data", "dp", [1], "does not read in"),
        (scaled("initial", "parameter", 2.0, 1), "fc", "initial", "dp", [1], "broadcast"),
        (scaled("forward", "output 0", 1.001, 1), "fc", "forward", "dp", [1], "something else"),
        (scaled("forward", "output 0", 1.001), "fc", "forward", "dp", [0, 1], "other rows than"),
        (without(("data", ""), ("forward", "fc")), "", "forward", "dp", [1], "eval()"),
        (without(("gradient", "fc.weight")), "fc", "gradient", "dp", [1], "frozen or detached"),
        (left_over, "", "gradient", "dp", [1], "not cleared"),
        (scaled("loss", "share", 3.0), "", "loss", "dp", [0, 1], "wrong scale"),
        (scaled("loss", "share", float("nan"), 1), "", "loss", "dp", [0, 1], "something else"),
        (scaled("gradient", "gradient", 1.001, 0), "fc", "gradient", "", [0, 1], "own gradient"),
        (not_reduced, "fc", "reduction", "dp", [0, 1], "missing all-reduce over dp"),
        (scaled("reduction", "gradient", 2.0), "fc", "reduction", "dp", [0, 1], "2 times"),
        (scaled("optimizer input", "learning rate", 2.0, 1), "", "optimizer input", "dp", [1], ""),
        (scaled("update", "parameter", 1.001, 0), "fc", "update", "dp", [0], "another step"),
    ],
)
def test_the_first_wrong_place_is_named(
    change: Change, layer: str, phase: str, axis: str, ranks: list[int], words: str
) -> None:
    finding = named(replicas(change))
    assert finding is not None
    assert (finding.layer, finding.phase, finding.axis) == (layer, phase, axis)
    assert list(finding.ranks) == ranks
    assert words in finding.cause
    assert finding.as_dict().keys() == {
        *("layer", "phase", "axis", "ranks", "step", "micro_batch"),
        *("difference", "tolerance", "cause"),
    }


def test_a_rounding_error_counts_only_without_a_measure() -> None:
    job = replicas(scaled("forward", "output 0", float(ROUNDING), 1))
    finding = first_difference(Record(job, {"dp": 2}), Record(twin(), {}))
    assert finding is not None
    assert finding.phase == "forward"


def test_a_twin_that_reads_on_and_lacks_the_samples_of_others_cannot_be_compared() -> None:
    job = replicas(rows_by(lambda rank: ROWS[:2] + 50 * rank))
    with pytest.raises(UsageError, match="samples of replica 1 cannot be compared"):
        named(job, twin(with_copy(RATE, READ_ON)))


@pytest.mark.parametrize(
    ("changes", "rank"), [((first_clips,), 1), ((without(("optimizer input", "")),), 0)]
)
def test_a_rank_that_does_not_clip_is_named(changes: tuple[Change, ...], rank: int) -> None:
    finding = named(replicas(*changes), twin(first_clips), twin(first_clips, factor=ROUNDING))
    assert finding is not None
    assert (finding.phase, finding.ranks) == ("clip", [rank])
    assert finding.as_dict()["difference"] is None
    assert "cannot be measured" in str(finding)


def test_a_replica_with_another_loss_of_its_micro_batch_is_named() -> None:
    job, single = replicas(), RankTensors(0, {})
    for number, of_replica in enumerate(job):
        for place, tensor in of_replica.tensors.items():
            own = place._replace(micro_batch=number) if place.micro_batch == 0 else place
            single.tensors[own] = tensor / 2 if place.phase == "loss" else tensor
    scaled("loss", "share", 1.5, 1)(job)
    finding = named(job, [single])
    assert finding is not None
    assert (finding.phase, finding.axis, finding.ranks) == ("loss", "dp", [1])
    assert "the loss function computes something else" in finding.cause


@pytest.mark.parametrize("sent", [True, False])
def test_what_another_ranks_optimizer_steps_may_be_sent_after_the_step(sent: bool) -> None:
    job, end = replicas(), UPDATE._replace(step=1)
    for rank, names in ((job[0], b'["fc.weight"]'), (job[1], b"[]")):
        rank.tensors[LISTED] = np.frombuffer(names, "uint8")
        rank.tensors[end] = rank.tensors[UPDATE]
    if sent:
        job[1].tensors[end._replace(phase="initial")] = job[0].tensors[UPDATE]
    job[1].tensors[UPDATE] = WEIGHT
    finding = named(job, twin(with_copy(UPDATE, end)))
    assert (finding is None) == sent
    assert finding is None or (finding.phase, finding.ranks) == ("update", [1])


@pytest.mark.parametrize(
    ("of_twin", "read_on", "is_named"),
    [(0.9, False, False), (1.0, False, True), (1.0, True, False)],
)
def test_what_a_script_makes_of_a_weight_between_steps_is_that_of_one_device(
    of_twin: float, read_on: bool, is_named: bool
) -> None:
    """What reads on has gone through the script's lines several times."""
    job, single = replicas(), twin(*[with_copy(RATE, READ_ON)] * read_on)
    for here, factor in (*((rank, 0.9) for rank in job), (single[0], of_twin)):
        value = here.tensors[UPDATE] * factor
        here.tensors[INITIAL._replace(step=1)] = value.astype("float32")
    finding = named(job, single)
    assert (finding is not None) == is_named
    if finding is not None:
        assert (finding.layer, finding.phase, finding.step) == ("fc", "initial", 1)
        assert "after the step before" in finding.cause


@pytest.mark.parametrize(("axis", "is_named"), [("pp", True), ("mp", False), ("dp", False)])
def test_a_number_that_is_handed_on_is_compared_where_ranks_have_all_rows(
    axis: str, is_named: bool
) -> None:
    rows = [ROWS[:2], ROWS[2:]] if axis == "dp" else [ROWS, ROWS]
    job, single = [one_rank(rank, {axis: rank}, rows[rank]) for rank in (0, 1)], twin()
    for here, value in (*((rank, 2.0) for rank in job), (single[0], 3.0)):
        here.tensors[OUTPUT._replace(role="output 1")] = np.full(1, value, "float32")
    finding = named(job, single, axis=axis)
    assert (finding is not None) == is_named
    assert finding is None or (finding.layer, finding.phase) == ("fc", "forward")


def test_a_parameter_that_one_rank_has_first_is_compared_once_others_have_it() -> None:
    """That of a second model, which ranks may call in another step."""
    job, single = replicas(), twin()
    later = TensorKey(1, "update", "critic.weight", role="parameter")
    for rank in (*job, *single):
        rank.tensors[later] = WEIGHT
    job[0].tensors[later._replace(phase="initial")] = WEIGHT
    assert named(job, single) is None
    job[1].tensors[later] = 2 * WEIGHT
    finding = named(job, single)
    assert finding is not None
    assert (finding.layer, finding.phase, finding.ranks) == ("critic", "update", [1])


def test_no_gradient_before_the_reduction_is_named_where_the_twin_has_one() -> None:
    job, single = replicas(), twin()
    kept = single[0].tensors[LOCAL]
    for rank in (*job, *single):
        rank.tensors.update({TOTAL: np.zeros_like(kept), UPDATE: WEIGHT})
        del rank.tensors[LOCAL]
    assert named(job, single) is None
    single[0].tensors[LOCAL] = kept
    finding = named(job, single)
    assert finding is not None
    assert (finding.layer, finding.phase) == ("fc", "gradient")


def test_a_value_that_is_changed_on_its_way_is_of_the_layer_around() -> None:
    """The twin's next layer takes what the one before has returned; the job's takes another."""
    job, single = replicas(), twin()
    after = OUTPUT._replace(name="block.norm")
    for rank in (*job, *single):
        rank.tensors[after] = rank.tensors[OUTPUT] + 1
    single[0].sources[after] = [OUTPUT]
    for factor, layer in ((1.0, None), (1.01, "block")):
        taken = job[1].tensors[OUTPUT] * np.float32(factor)
        job[1].tensors[after._replace(role="input 0")] = taken
        finding = named(job, single)
        assert (finding and finding.layer) == layer


@pytest.mark.parametrize("reduced", [True, False])
def test_parts_are_wrong_where_they_are_never_added_up(reduced: bool) -> None:
    """Two members have a part each of the sum that a layer makes, and a block returns."""
    job, block = (
        [one_rank(rank, {"mp": rank}, ROWS) for rank in (0, 1)],
        OUTPUT._replace(name="block"),
    )
    for rank in job:
        whole = rank.tensors[OUTPUT]
        part = whole * np.float32(0.25 + 0.5 * rank.rank)
        rank.tensors.update({OUTPUT: part, block: whole if reduced else part})
        rank.tensors[SHARE] = rank.tensors[SHARE] * np.float32(1 if reduced else 0.5)
    with_block = with_copy(OUTPUT, block)
    finding = named(job, twin(with_block), twin(with_block, factor=ROUNDING), "mp")
    assert (finding is None) == reduced
    if finding is not None:
        assert (finding.layer, finding.phase, finding.axis) == ("fc", "forward", "mp")
        assert "missing all-reduce over mp" in finding.cause


@pytest.mark.parametrize(
    ("outer", "split", "right"),
    [("dp", "mp", False), ("dp", "", True), ("sep", "sep", True), ("dp", "mask", True)],
)
def test_members_may_drop_the_same_of_equal_values_and_not_of_shards(
    outer: str, split: str, right: bool
) -> None:
    single, ranks, place = twin(), [], OUTPUT._replace(name="drop")
    wide = np.arange(120.0, dtype="float32").reshape(3, 40)
    single[0].tensors[place] = ROWS @ wide
    for rank in range(4):
        coordinate = {outer: rank // 2, "mp": rank % 2}
        rows = ROWS[rank // 2 * 2 :][:2] if outer == "dp" else ROWS
        here = one_rank(rank, coordinate, rows)
        start = 20 * coordinate.get("mp" if split == "mask" else split, 0)
        here.tensors[place] = (rows @ wide)[:, start : start + 20 if split else 40]
        draw = np.random.default_rng(rank // 2)
        mask = draw.random(here.tensors[place].shape) < 0.5
        here.tensors[place._replace(role="mask")] = mask
        # Each may draw the mask of the whole tensor, over ones, and keep its part of it.
        taken = np.ones(32) if split == "mask" else here.tensors[place].reshape(-1)[:32]
        here.tensors[place._replace(role=record.DROPPED)] = taken
        ranks.append(here)
    finding = first_difference(Record(ranks, {outer: 2, "mp": 2}), *[Record(single, {})] * 2)
    assert (finding is None) == right, finding
    assert finding is None or finding.layer == "drop"
    assert finding is None or "the same numbers on ranks along mp" in finding.cause


@pytest.mark.parametrize(("owner", "right"), [(0, True), (1, False)])
def test_ranks_whose_optimizer_has_not_a_parameter_may_have_any_gradient_of_it(
    owner: int, right: bool
) -> None:
    """Each steps its share, and the sum of a gradient goes to the rank that steps by it."""
    job = replicas(scaled("reduction", "gradient", 0.5, 1))
    job[1 - owner].tensors[LISTED] = np.frombuffer(b"[]", "uint8")
    assert (named(job) is None) == right


@pytest.mark.parametrize(
    ("kind", "of_another", "right"),
    [("float32", False, True), ("float32", True, False), ("int64", False, False)],
)
def test_labels_that_are_computed_are_no_other_samples(
    kind: str, of_another: bool, right: bool
) -> None:
    job, single = replicas(), twin()
    place = TensorKey(0, "data", "", 0, "label")
    single[0].tensors[place] = ROWS.astype(kind)
    for rank, here in enumerate(job):
        rows = ROWS[2 * rank : 2 * rank + 2]
        here.tensors[place] = (rows[::-1] if of_another else rows * 3).astype(kind)
    finding = named(job, single, twin(factor=ROUNDING))
    assert (finding is None) == right
    assert finding is None or "labels are not those" in finding.cause


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    here = one_rank(1, {"dp": 1}, ROWS)
    here.sources[OUTPUT] = [OUTPUT._replace(name="embedding")]
    tensors = dict(here.tensors)
    record.write(tmp_path, here, {"dp": 2}, 0)
    assert not here.tensors
    again = record.read(tmp_path)
    (rank,) = again.ranks
    assert (rank.rank, rank.coordinate, again.degrees) == (1, {"dp": 1}, {"dp": 2})
    assert rank.tensors.keys() == tensors.keys()
    assert all(rank.tensors[p].tobytes() == t.tobytes() for p, t in tensors.items())
    assert rank.sources == {OUTPUT: [OUTPUT._replace(name="embedding")]}


@pytest.mark.parametrize(
    ("order", "factor", "words"),
    [
        ((0, 1), 1.0, ""),
        ((1, 0), 1.0, "the shards of others"),
        ((0, 0), 1.0, "from one random stream"),
        ((0, 1), 1.001, "other values than the twin's"),
        ((0, 1), 2.0, ""),  # drawn by each rank for itself
    ],
)
def test_shards_in_another_ranks_place_are_named(
    order: tuple[int, int], factor: float, words: str
) -> None:
    ranks, single = [one_rank(rank, {"mp": rank}, ROWS) for rank in (0, 1)], twin()
    place = INITIAL._replace(name="up.weight")
    whole = np.arange(12.0, dtype="float32").reshape(2, 6)
    single[0].tensors[place] = whole
    for rank, shard in zip(ranks, order):
        rank.tensors[place] = whole[:, 3 * shard :][:, :3]
    ranks[1].tensors[place] = ranks[1].tensors[place] * np.float32(factor)
    finding = named(ranks, single, twin(factor=ROUNDING), "mp")
    assert (finding is None) == (words == "")
    if finding is not None:
        assert (finding.layer, finding.phase, finding.axis) == ("up", "initial", "mp")
        assert words in finding.cause
