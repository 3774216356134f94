"""Whatever JSON a file holds, its reader returns a value or names the file in an error of ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleetpipe.checkpoint.files import manifest
from fleetpipe.errors import CheckpointError, ConfigError, FleetPipeError, ScheduleError
from fleetpipe.fleet_files.manifest import newest_save_in
from fleetpipe.json_value import Source, parse, read
from fleetpipe.profiling import PipelinePlan, Profile
from fleetpipe.schedules import Costs, Schedule, build

pytestmark = pytest.mark.once

DATA = Path(__file__).parents[1] / "data"
SOURCE = Source("this is no shelf", ConfigError, "build one")

#: Any value of JSON; numbers that are large, and NaN, among them.
VALUES: Any = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -1, 2**63, 1e300, "../a", "F0.0"])
    | st.floats()
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


class Format(NamedTuple):
    """A file that is read.

    Attributes:
        name: Its name.
        valid: A value that is read.
        read: Reads the file.
        refuses: Whether what is no JSON is an error; a report of a run leaves it out with a note.
    """

    name: str
    valid: Any
    read: Callable[[Path], object]
    refuses: bool = True


def stored(name: str) -> Any:
    return json.loads((DATA / name).read_text())


def read_manifest(path: Path) -> object:
    """Reads the manifest of a checkpoint whose checksum is right, whatever it says."""
    contents = json.loads(path.read_text())
    if isinstance(contents, dict):
        path.write_text(manifest.seal({k: v for k, v in contents.items() if k != "crc32"}))
    return manifest.read_manifest(path.parent)


#: The options of a schedule stand in the header of its text form.
SCHEDULE = str(build("kFkB", ranks=2, micro_batches=4, groups=[3, 1]))


def read_schedule(path: Path) -> object:
    """Reads a schedule whose options are what a file holds."""
    text = path.read_text(encoding="latin-1").replace(", ", ",").replace(": ", ":")
    return Schedule.parse(SCHEDULE.replace('{"groups":[3,1]}', text.replace(" ", "\\u0020")))


FORMATS = [
    Format("profile.json", stored("profile.json"), Profile.read),
    Format("plan.json", stored("plan.json"), PipelinePlan.read),
    Format("costs.json", {"forward": [1, 2], "each_slice": [{"comm": 1}]}, Costs.read),
    Format("manifest.json", stored("checkpoint/step-00000002/manifest.json"), read_manifest),
    Format(
        "manifest-000.json",
        {"save": "a", "files": {"layer": "digest"}},
        lambda path: newest_save_in(path.parent),
    ),
    Format("options", {"groups": [3, 1]}, read_schedule),
]


def replaced(draw: Any, value: Any) -> Any:
    """Puts another value somewhere into a value, or takes something out of it."""
    if not isinstance(value, (dict, list)) or not value or draw(st.integers(0, 4)) == 0:
        return draw(VALUES)
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = draw(st.sampled_from(keys))
    changed = value.copy()
    if draw(st.integers(0, 6)) == 0:
        del changed[key]
    else:
        changed[key] = replaced(draw, value[key])
    return changed


def refusal(form: Format, path: Path) -> str:
    """Returns what the reader says against a file; its name where it reads it."""
    try:
        form.read(path)
    except FleetPipeError as error:
        return str(error)
    return form.name


def checks_of(formats: list[Format]) -> tuple[Callable[..., None], Callable[..., None]]:
    """Returns tests of these files: of any value of JSON, and of what is no JSON."""
    each = pytest.mark.parametrize("form", formats, ids=[form.name for form in formats])

    @each
    @settings(
        max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )
    @given(data=st.data())
    def test_any_value(form: Format, tmp_path: Path, data: Any) -> None:
        path = tmp_path / form.name
        path.write_text(json.dumps(replaced(data.draw, form.valid)))
        assert form.name in refusal(form, path)

    @each
    def test_no_json(form: Format, tmp_path: Path) -> None:
        path = tmp_path / form.name
        for text in (b"", b"{", b"[" * 200_000, b"\xff", b"1" * 5000):
            path.write_bytes(text)
            if not form.refuses:
                form.read(path)
            elif form.read is not read_manifest:
                with pytest.raises((ConfigError, CheckpointError, ScheduleError), match=form.name):
                    form.read(path)
        path.write_text(json.dumps(form.valid))
        form.read(path)

    return test_any_value, test_no_json


test_any_value_is_read_or_refused, test_what_is_no_json_is_refused = checks_of(FORMATS)


def test_an_error_names_the_file_the_place_what_was_expected_and_what_stands_there(
    tmp_path: Path,
) -> None:
    path = tmp_path / "shelf.json"
    path.write_text('{"boards": [{"length": 2}, {"length": "long"}]}')
    with pytest.raises(ConfigError) as raised:
        read(path, SOURCE, lambda found: [b["length"].figure() for b in found["boards"].items()])
    assert str(raised.value).splitlines() == [
        "this is no shelf",
        f"  where: {path}: boards[1].length",
        "  expected: a number of 0 or more",
        "  got: 'long'",
        "  what to do: build one",
    ]


class Board(NamedTuple):
    length: float
    width: float = 0.5
    holes: int | None = None


def test_a_file_of_toml_is_read_by_its_name(tmp_path: Path) -> None:
    pytest.importorskip("tomllib", reason="reading TOML needs Python 3.11")
    path = tmp_path / "shelf.toml"
    path.write_text('books = 3\n[size]\nwidth = 1.5\nwood = "oak"\n', encoding="utf-8")
    content = read(path, SOURCE, lambda value: value.content)
    assert content == {"books": 3, "size": {"width": 1.5, "wood": "oak"}}
    path.write_text("books = ", encoding="utf-8")
    with pytest.raises(ConfigError, match="expected: TOML"):
        read(path, SOURCE, lambda value: value.content)


def test_a_record_has_the_fields_of_its_class() -> None:
    def board(text: str) -> Board:
        return parse(text, SOURCE).record(Board)

    assert board('{"length": 2, "holes": null}') == Board(2)
    assert board('{"length": 2, "holes": 3}') == Board(2, holes=3)
    for text, message in (
        ('{"width": 2}', "expected: an object with 'length'"),
        ('{"length": 2, "lenght": 2}', "did you mean 'length'"),
        ('{"length": 2, "width": null}', "(?s)where: width.*got: None"),
        ('{"length": 2, "holes": 1.5}', "(?s)where: holes.*whole number"),
        ('{"length": true}', "(?s)where: length.*got: True"),
        ("[]", "(?s)expected: an object.*got: \\[\\]"),
    ):
        with pytest.raises(ConfigError, match=message):
            board(text)
    assert parse("[2, 0.25, 1]", SOURCE).row(Board) == Board(2, 0.25, 1)
    with pytest.raises(ConfigError, match="a list of 3 values"):
        parse("[2, 0.25]", SOURCE).row(Board)
