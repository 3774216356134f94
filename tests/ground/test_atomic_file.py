"""Files that are the old ones or the new ones whole; kills are tried in tests/checkpoint."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fleetpipe import atomic_file

pytestmark = pytest.mark.no_paddle


def test_a_write_that_fails_leaves_the_old_file_and_no_draft(tmp_path: Path) -> None:
    file = tmp_path / "figures"
    atomic_file.replace_text(file, "old")

    def fail() -> None:
        with atomic_file.draft_of(file) as draft:
            draft.write_text("ne")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert (file.read_text(), [*tmp_path.iterdir()]) == ("old", [file])
    atomic_file.replace_text(file, "new")
    assert (file.read_text(), [*tmp_path.iterdir()]) == ("new", [file])


def test_several_files_stay_where_the_body_fails(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")

    def fail() -> None:
        with atomic_file.replacing(tmp_path) as folder:
            (folder / "a").write_text("new")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "old"}


def test_of_several_writers_the_first_one_counts(tmp_path: Path) -> None:
    file = tmp_path / "failure"
    texts = [f"{number}" * 1000 for number in range(8)]
    with ThreadPoolExecutor(8) as threads:
        [*threads.map(lambda text: atomic_file.write_once(file, text), texts)]
    first = file.read_text()
    assert first in texts
    atomic_file.write_once(file, "late")
    assert (file.read_text(), [*tmp_path.iterdir()]) == (first, [file])
