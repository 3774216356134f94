"""A job beside its twin, both written by hand: what is named, and what is no difference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fleetpipe.contrib.locator import record
from fleetpipe.contrib.locator.comparison import first_difference
from fleetpipe.contrib.locator.record import Meaning, RankTensors, Record
from fleetpipe.errors import UsageError

#: By rank, changes what a right rank has.
Change = Callable[[list[RankTensors]], None]
WEIGHT = np.arange(1.0, 7.0, dtype="float32").reshape(3, 2)
ROWS = np.arange(12.0, dtype="float32").reshape(4, 3)
ROUNDING = np.float32(1 + 2**-23)


def one_rank(rank: int, coordinate: dict[str, int], rows: np.ndarray, count: int) -> RankTensors:
    """Returns a step of ``rows @ WEIGHT`` in one micro-batch, of ``count`` replicas."""
    here = RankTensors(rank, coordinate)
    outputs = rows @ WEIGHT
    gradient = np.full_like(outputs, 1 / outputs.size)
    local, total = rows.T @ gradient, ROWS.T @ np.full([4, 2], 1 / 8, "float32")

    def put(phase: str, name: str, part: str, value: object, micro_batch: int = -1) -> None:
        here.tensors[Meaning(0, phase, name, micro_batch, part)] = np.asarray(value)

    put("initial", "fc.weight", "parameter", WEIGHT)
    put("data", "", "input", rows, 0)
    put("forward", "fc", "output 0", outputs, 0)
    put("loss", "", "share", np.float32(outputs.mean()), 0)
    put("gradient", "fc", "output 0", gradient, 0)
    put("gradient", "fc.weight", "gradient", local)
    put("reduction", "fc.weight", "gradient", total)
    put("optimizer input", "", "learning rate", np.float64(0.1))
    put("optimizer input", "", "parameters", np.frombuffer(b'["fc.weight"]', "uint8"))
    put("update", "fc.weight", "parameter", WEIGHT - np.float32(0.1) * total)
    return here


def replicas() -> list[RankTensors]:
    """Returns two replicas, each of which has two of four rows."""
    return [one_rank(rank, {"dp": rank}, ROWS[2 * rank : 2 * rank + 2], 2) for rank in (0, 1)]


def compared(ranks: list[RankTensors], axis: str = "dp") -> record.Record:
    return Record(ranks, {axis: len(ranks)})


def twin(factor: float = 1.0) -> record.Record:
    single = one_rank(0, {}, ROWS, 1)
    if factor != 1:
        floats = {p: t for p, t in single.tensors.items() if p.phase != "data"}
        single.tensors.update({p: (t * factor).astype(t.dtype) for p, t in floats.items()})
    return Record([single], {})


def test_replicas_of_a_right_job_make_the_twin() -> None:
    assert first_difference(compared(replicas()), twin(), twin(ROUNDING)) is None


def test_rows_are_known_by_content_in_any_order() -> None:
    other = [one_rank(rank, {"dp": rank}, ROWS[1 - rank :: 2], 2) for rank in (0, 1)]
    assert first_difference(compared(other), twin(), twin(ROUNDING)) is None


def test_a_replica_that_alone_has_another_order_of_rows_is_named() -> None:
    """Where all have, the twin has its order by chance."""
    for orders, ranks in (([1, -1], [1]), ([-1, 1], [0]), ([-1, -1], None)):
        job = [
            one_rank(rank, {"dp": rank}, ROWS[2 * rank : 2 * rank + 2][::order], 2)
            for rank, order in enumerate(orders)
        ]
        finding = first_difference(compared(job), twin(), twin(ROUNDING))
        assert (finding and finding.ranks) == ranks
        assert finding is None or (finding.phase, finding.axis) == ("data", "dp")
        assert finding is None or "in another order" in finding.cause


def test_a_twin_that_lacks_the_samples_of_other_replicas_cannot_be_compared() -> None:
    """It reads on, and what it reads is no replica's; where it need not, a sampler is wrong."""
    job = [one_rank(rank, {"dp": rank}, ROWS[:2] + 50 * rank, 2) for rank in (0, 1)]
    finding = first_difference(compared(job), twin(), twin(ROUNDING))
    assert finding is not None
    assert finding.phase == "data"
    single = twin()
    single.ranks[0].tensors[Meaning(0, "data", "", part=record.READ_ON)] = np.array(1)
    with pytest.raises(UsageError, match="samples of replica 1 cannot be compared"):
        first_difference(compared(job), single, twin(ROUNDING))


def _scaled(phase: str, part: str, factor: float, rank: int | None = None) -> Change:
    def change(ranks: list[RankTensors]) -> None:
        for here in ranks if rank is None else [ranks[rank]]:
            for place in here.tensors:
                if place.phase == phase and place.part == part:
                    value = here.tensors[place]
                    here.tensors[place] = (value * factor).astype(value.dtype)

    return change


def _not_reduced(ranks: list[RankTensors]) -> None:
    for rank in ranks:
        local = rank.tensors[Meaning(0, "gradient", "fc.weight", part="gradient")]
        rank.tensors[Meaning(0, "reduction", "fc.weight", part="gradient")] = local / 2


def _left_over(ranks: list[RankTensors]) -> None:
    total = ranks[-1].tensors[Meaning(0, "reduction", "fc.weight", part="gradient")]
    ranks[-1].tensors[Meaning(0, "gradient", "fc.weight", part=record.LEFT)] = total


def test_a_rank_that_does_not_clear_its_gradients_is_named_unless_the_twin_does_not() -> None:
    job, single = replicas(), twin()
    _left_over(job)
    finding = first_difference(compared(job), single, twin(ROUNDING))
    assert finding is not None
    assert (finding.phase, finding.axis, finding.ranks) == ("gradient", "dp", [1])
    assert "not cleared" in finding.cause
    _left_over(list(single.ranks))
    assert first_difference(compared(job), single, twin(ROUNDING)) is None


def _one_clips(ranks: list[RankTensors]) -> None:
    total = ranks[0].tensors[Meaning(0, "reduction", "fc.weight", part="gradient")]
    ranks[0].tensors[Meaning(0, "clip", "fc.weight", part="gradient")] = total


def test_a_rank_that_does_not_clip_is_named() -> None:
    job, single, moved = replicas(), twin(), twin(ROUNDING)
    for ranks in (job, list(single.ranks), list(moved.ranks)):
        _one_clips(ranks)
    finding = first_difference(compared(job), single, moved)
    assert finding is not None
    assert (finding.phase, finding.axis, finding.ranks) == ("clip", "dp", [1])
    assert finding.as_dict()["difference"] is None
    assert "cannot be measured" in str(finding)
    # Its shard has no parameter: others step for it.
    del job[1].tensors[Meaning(0, "optimizer input", "", part="learning rate")]
    assert first_difference(compared(job), single, moved) is None
    del job[0].tensors[Meaning(0, "clip", "fc.weight", part="gradient")]
    finding = first_difference(compared(job), single, moved)
    assert finding is not None
    assert (finding.phase, finding.ranks) == ("clip", [0])


def test_a_replica_with_another_loss_of_its_micro_batch_is_named() -> None:
    job, single = replicas(), RankTensors(0, {})
    for number, of_replica in enumerate(job):
        for place, tensor in of_replica.tensors.items():
            own = place._replace(micro_batch=number) if place.micro_batch == 0 else place
            single.tensors[own] = tensor / 2 if place.phase == "loss" else tensor
    _scaled("loss", "share", 1.5, 1)(job)
    finding = first_difference(compared(job), Record([single], {}), Record([single], {}))
    assert finding is not None
    assert (finding.phase, finding.axis, finding.ranks) == ("loss", "dp", [1])
    assert "the loss function computes something else" in finding.cause


def _without(phase: str, name: str) -> Change:
    """Takes the tensors of a name from the last rank."""

    def change(ranks: list[RankTensors]) -> None:
        held = ranks[-1].tensors.items()
        ranks[-1].tensors = {p: t for p, t in held if (p.phase, p.name) != (phase, name)}

    return change


def _evaluates(ranks: list[RankTensors]) -> None:
    for phase, name in (("data", ""), ("forward", "fc")):
        _without(phase, name)(ranks)


def _same_rows(ranks: list[RankTensors]) -> None:
    ranks[1].tensors = dict(ranks[0].tensors)


@pytest.mark.parametrize(
    ("change", "layer", "phase", "axis", "ranks", "words"),
    [
        (_same_rows, "", "data", "dp", [1], "does not know of the replicas"),
        (_scaled("initial", "parameter", 2.0, 1), "fc", "initial", "dp", [1], "broadcast"),
        (_scaled("forward", "output 0", 1.001, 1), "fc", "forward", "dp", [1], "something else"),
        (_scaled("forward", "output 0", 1.001), "fc", "forward", "dp", [0, 1], "other rows than"),
        (_evaluates, "", "forward", "dp", [1], "eval()"),
        (_without("gradient", "fc.weight"), "fc", "gradient", "dp", [1], "frozen or detached"),
        (_scaled("loss", "share", 3.0), "", "loss", "dp", [0, 1], "wrong scale"),
        (_scaled("loss", "share", float("nan"), 1), "", "loss", "dp", [0, 1], "something else"),
        (_scaled("gradient", "gradient", 1.001, 0), "fc", "gradient", "", [0, 1], "own gradient"),
        (_not_reduced, "fc", "reduction", "dp", [0, 1], "missing all-reduce over dp"),
        (_scaled("reduction", "gradient", 2.0), "fc", "reduction", "dp", [0, 1], "2 times"),
        (_scaled("optimizer input", "learning rate", 2.0, 1), "", "optimizer input", "dp", [1], ""),
        (_scaled("update", "parameter", 1.001, 0), "fc", "update", "dp", [0], "another step"),
    ],
)
def test_the_first_wrong_place_is_named(
    change: Change, layer: str, phase: str, axis: str, ranks: list[int], words: str
) -> None:
    job = replicas()
    change(job)
    finding = first_difference(compared(job), twin(), twin(ROUNDING))
    assert finding is not None
    assert (finding.layer, finding.phase, finding.axis) == (layer, phase, axis)
    assert list(finding.ranks) == ranks
    assert words in finding.cause
    assert finding.as_dict().keys() == {
        *("layer", "phase", "axis", "ranks", "step", "micro_batch"),
        *("difference", "tolerance", "cause"),
    }


@pytest.mark.parametrize("sent", [True, False])
def test_what_another_ranks_optimizer_steps_may_be_sent_after_the_step(sent: bool) -> None:
    single = twin()
    job, end = replicas(), Meaning(1, "update", "fc.weight", part="parameter")
    listed = Meaning(0, "optimizer input", "", part="parameters")
    stepped = end._replace(step=0)
    for rank, names in ((job[0], b'["fc.weight"]'), (job[1], b"[]")):
        rank.tensors[listed] = np.frombuffer(names, "uint8")
        rank.tensors[end] = rank.tensors[stepped]
    single.ranks[0].tensors[end] = job[0].tensors[end]
    if sent:
        job[1].tensors[end._replace(phase="initial")] = job[0].tensors[stepped]
    job[1].tensors[stepped] = WEIGHT
    finding = first_difference(compared(job), single, single)
    assert (finding is None) == sent
    assert finding is None or (finding.phase, finding.ranks) == ("update", [1])


@pytest.mark.parametrize(
    ("of_twin", "read_on", "named"),
    [(0.9, False, False), (1.0, False, True), (1.0, True, False)],
)
def test_what_a_script_makes_of_a_weight_between_steps_is_that_of_one_device(
    of_twin: float, read_on: bool, named: bool
) -> None:
    """What reads on has gone through the script's lines several times."""
    job, single = replicas(), twin()
    for here, factor in (*((rank, 0.9) for rank in job), (single.ranks[0], of_twin)):
        value = here.tensors[Meaning(0, "update", "fc.weight", part="parameter")] * factor
        place = Meaning(1, "initial", "fc.weight", part="parameter")
        here.tensors[place] = value.astype("float32")
    if read_on:
        single.ranks[0].tensors[Meaning(0, "data", "", part=record.READ_ON)] = np.array(1)
    finding = first_difference(compared(job), single, single)
    assert (finding is not None) == named
    if finding is not None:
        assert (finding.layer, finding.phase, finding.step) == ("fc", "initial", 1)
        assert "after the step before" in finding.cause


@pytest.mark.parametrize(("axis", "named"), [("pp", True), ("mp", False), ("dp", False)])
def test_a_number_that_is_handed_on_is_compared_where_ranks_have_all_rows(
    axis: str, named: bool
) -> None:
    rows = [ROWS[:2], ROWS[2:]] if axis == "dp" else [ROWS, ROWS]
    job = [one_rank(rank, {axis: rank}, rows[rank], 1) for rank in (0, 1)]
    single = twin()
    for here, value in (*((rank, 2.0) for rank in job), (single.ranks[0], 3.0)):
        here.tensors[Meaning(0, "forward", "fc", 0, "output 1")] = np.full(1, value, "float32")
    finding = first_difference(compared(job, axis), single, single)
    assert (finding is not None) == named
    assert finding is None or (finding.layer, finding.phase) == ("fc", "forward")


def test_a_parameter_that_one_rank_has_first_is_compared_once_others_have_it() -> None:
    """That of a second model, which ranks may call in another step."""
    job, single = replicas(), twin()
    later = Meaning(1, "update", "critic.weight", part="parameter")
    for rank in (*job, *single.ranks):
        rank.tensors[later] = WEIGHT
    job[0].tensors[later._replace(phase="initial")] = WEIGHT
    assert first_difference(compared(job), single, single) is None
    job[1].tensors[later] = 2 * WEIGHT
    finding = first_difference(compared(job), single, single)
    assert finding is not None
    assert (finding.layer, finding.phase, finding.ranks) == ("critic", "update", [1])


def test_no_gradient_before_the_reduction_is_named_where_the_twin_has_one() -> None:
    job, single = replicas(), twin()
    place = Meaning(0, "gradient", "fc.weight", part="gradient")
    for rank in (*job, single.ranks[0]):
        total = place._replace(phase="reduction")
        rank.tensors[total] = np.zeros_like(rank.tensors[total])
        rank.tensors[place._replace(phase="update", part="parameter")] = WEIGHT
    kept = single.ranks[0].tensors[place]
    for rank in (*job, single.ranks[0]):
        del rank.tensors[place]
    assert first_difference(compared(job), single, single) is None
    single.ranks[0].tensors[place] = kept
    finding = first_difference(compared(job), single, single)
    assert finding is not None
    assert (finding.layer, finding.phase) == ("fc", "gradient")


def test_a_value_that_is_changed_on_its_way_is_of_the_layer_around() -> None:
    """The twin's next layer takes what the one before has returned; the job's takes another."""
    job, single = replicas(), twin()
    made = Meaning(0, "forward", "fc", 0, "output 0")
    after = made._replace(name="block.norm")
    for rank in (*job, single.ranks[0]):
        rank.tensors[after] = rank.tensors[made] + 1
    single.ranks[0].sources[after] = [made]
    taken = after._replace(part="input 0")
    for factor, layer in ((1.0, None), (1.01, "block")):
        job[1].tensors[taken] = job[1].tensors[made] * np.float32(factor)
        finding = first_difference(compared(job), single, single)
        assert (finding and finding.layer) == layer


def _members(reduced: bool) -> list[RankTensors]:
    """Returns two members, each with half of the sum that a layer makes."""
    ranks = [one_rank(rank, {"mp": rank}, ROWS, 1) for rank in (0, 1)]
    for rank in ranks:
        if not reduced:
            share = Meaning(0, "loss", "", 0, "share")
            rank.tensors[share] = rank.tensors[share] * np.float32(0.5)
        place = Meaning(0, "forward", "fc", 0, "output 0")
        whole = rank.tensors[place]
        tensors = {place: whole * np.float32(0.25 + 0.5 * rank.rank)}
        after = whole if reduced else tensors[place]
        tensors[place._replace(name="block")] = after
        rank.tensors = {**rank.tensors, **tensors}
    return ranks


def _with_block(factor: float = 1.0) -> record.Record:
    single = twin(factor)
    (rank,) = single.ranks
    output = rank.tensors[Meaning(0, "forward", "fc", 0, "output 0")]
    rank.tensors[Meaning(0, "forward", "block", 0, "output 0")] = output
    return single


def test_parts_that_are_added_up_later_are_right() -> None:
    job = compared(_members(reduced=True), "mp")
    assert first_difference(job, _with_block(), _with_block(ROUNDING)) is None


def test_parts_that_are_never_added_up_are_named() -> None:
    job = compared(_members(reduced=False), "mp")
    finding = first_difference(job, _with_block(), _with_block(ROUNDING))
    assert finding is not None
    assert (finding.layer, finding.phase, finding.axis) == ("fc", "forward", "mp")
    assert "missing all-reduce over mp" in finding.cause


@pytest.mark.parametrize(
    ("outer", "split", "right"),
    [("dp", "mp", False), ("dp", "", True), ("sep", "sep", True), ("dp", "mask", True)],
)
def test_members_may_drop_the_same_of_equal_values_and_not_of_shards(
    outer: str, split: str, right: bool
) -> None:
    single, ranks = twin(), []
    place = Meaning(0, "forward", "drop", 0, "output 0")
    wide = np.arange(120.0, dtype="float32").reshape(3, 40)
    single.ranks[0].tensors[place] = ROWS @ wide
    for rank in range(4):
        coordinate = {outer: rank // 2, "mp": rank % 2}
        rows = ROWS[rank // 2 * 2 :][:2] if outer == "dp" else ROWS
        here = one_rank(rank, coordinate, rows, 2)
        start = 20 * coordinate.get("mp" if split == "mask" else split, 0)
        here.tensors[place] = (rows @ wide)[:, start : start + 20 if split else 40]
        draw = np.random.default_rng(rank // 2)
        mask = draw.random(here.tensors[place].shape) < 0.5
        here.tensors[place._replace(part="mask")] = mask
        # Each may draw the mask of the whole tensor, over ones, and keep its part of it.
        taken = np.ones(32) if split == "mask" else here.tensors[place].reshape(-1)[:32]
        here.tensors[place._replace(part=record.DROPPED)] = taken
        ranks.append(here)
    finding = first_difference(Record(ranks, {outer: 2, "mp": 2}), single, single)
    assert (finding is None) == right, finding
    assert finding is None or finding.layer == "drop"
    assert finding is None or "the same numbers on ranks along mp" in finding.cause


def test_ranks_whose_optimizer_has_not_a_parameter_may_have_any_gradient_of_it() -> None:
    """Each steps its share, and the sum of a gradient goes to the rank that steps by it."""
    for owner, right in ((0, True), (1, False)):
        job = replicas()
        _scaled("reduction", "gradient", 0.5, 1)(job)
        listing = Meaning(0, "optimizer input", "", part="parameters")
        job[1 - owner].tensors[listing] = np.frombuffer(b"[]", "uint8")
        assert (first_difference(compared(job), twin(), twin(ROUNDING)) is None) == right


def test_gradients_may_be_clipped_by_hand_before_the_step() -> None:
    job, single = replicas(), twin()
    for ranks in (job, list(single.ranks)):
        _scaled("reduction", "gradient", 0.3)(ranks)
    assert first_difference(compared(job), single, single) is None


@pytest.mark.parametrize(
    ("kind", "of_another", "right"),
    [("float32", False, True), ("float32", True, False), ("int64", False, False)],
)
def test_labels_that_are_computed_are_no_other_samples(
    kind: str, of_another: bool, right: bool
) -> None:
    job, single = replicas(), twin()
    place = Meaning(0, "data", "", 0, "label")
    single.ranks[0].tensors[place] = ROWS.astype(kind)
    for rank, here in enumerate(job):
        rows = ROWS[2 * rank : 2 * rank + 2]
        here.tensors[place] = (rows[::-1] if of_another else rows * 3).astype(kind)
    finding = first_difference(compared(job), single, twin(ROUNDING))
    assert (finding is None) == right
    assert finding is None or "labels are not those" in finding.cause


def test_a_rounding_error_counts_only_without_a_measure() -> None:
    job = replicas()
    _scaled("forward", "output 0", float(ROUNDING), 1)(job)
    assert first_difference(compared(job), twin(), twin(ROUNDING)) is None
    finding = first_difference(compared(job), twin())
    assert finding is not None
    assert finding.phase == "forward"


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    here = one_rank(1, {"dp": 1}, ROWS, 1)
    place = Meaning(0, "forward", "fc", 0, "output 0")
    here.sources[place] = [place._replace(name="embedding")]
    tensors = dict(here.tensors)
    record.write(tmp_path, here, {"dp": 2}, 0)
    assert not here.tensors
    again = record.read(tmp_path)
    (rank,) = again.ranks
    assert (rank.rank, rank.coordinate, again.degrees) == (1, {"dp": 1}, {"dp": 2})
    assert rank.tensors.keys() == tensors.keys()
    assert all(rank.tensors[p].tobytes() == t.tobytes() for p, t in tensors.items())
    assert rank.sources == {place: [place._replace(name="embedding")]}


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="trained no step"):
        record.read(tmp_path)
    (tmp_path / "rank-00000.step-000000.safetensors").write_bytes(b"nothing")
    with pytest.raises(UsageError, match="is damaged"):
        record.read(tmp_path)


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
    ranks = [one_rank(rank, {"mp": rank}, ROWS, 1) for rank in (0, 1)]
    place = Meaning(0, "initial", "up.weight", part="parameter")
    whole = np.arange(12.0, dtype="float32").reshape(2, 6)
    single = twin()
    single.ranks[0].tensors[place] = whole
    for rank, shard in zip(ranks, order):
        rank.tensors[place] = whole[:, 3 * shard :][:, :3]
    ranks[1].tensors[place] = ranks[1].tensors[place] * np.float32(factor)
    finding = first_difference(Record(ranks, {"mp": 2}), single, twin(ROUNDING))
    assert (finding is None) == (words == "")
    if finding is not None:
        assert (finding.layer, finding.phase, finding.axis) == ("up", "initial", "mp")
        assert words in finding.cause
