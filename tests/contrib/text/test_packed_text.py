"""A text as sequences: every token once, documents apart, written once and read by all ranks."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleetpipe.contrib import text as tokens_of_text
from fleetpipe.errors import CheckpointError, ConfigError, PackageNotFound
from fleetpipe.io import DataLoader, PackedText
from tests.fixtures import Call, Patch

tokenizers = pytest.importorskip("tokenizers", reason="the text extra has it")

WORDS = ["the", "cat", "sat", "on", "a", "mat", "while", "it", "rained", "and", "no", "dog"]


def texts(count: int = 7) -> list[str]:
    numbers = np.random.default_rng(0)
    return [" ".join(numbers.choice(WORDS, 3 + 9 * n)) for n in range(count)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text" / "below").mkdir(parents=True)
    for number, text in enumerate(texts()):
        place = "below/" if number % 2 else ""
        (tmp_path / "text" / f"{place}{number}.txt").write_text(text)
    (tmp_path / "text" / ".hidden").write_bytes(b"\xff")
    return tmp_path / "text"


def packed(folder: Path | None, cache: Path | None = None, **options: Any) -> PackedText:
    where = cache or (folder or Path()).parent / "cache"
    return PackedText(folder, cache=where, **{"length": 16, "vocabulary": 280, **options})


def documents_of(data: PackedText) -> list[str]:
    """The text of each document, put together from the sequences again."""
    found: list[list[int]] = []
    for ids, documents, labels in data:  # type: ignore[attr-defined]
        assert ids.shape == documents.shape == labels.shape
        for place, (token, label) in enumerate(zip(ids, labels)):
            if documents[place] == tokens_of_text._PADDING:
                assert (token, label) == (data.end, tokens_of_text.IGNORED)
                continue
            if place + 1 < len(ids) and label != tokens_of_text.IGNORED:
                assert (label, documents[place]) == (ids[place + 1], documents[place + 1])
            if not found or found[-1][-1] == data.end:
                found.append([])
            found[-1].append(int(token))
            # In varied sequences the token that ends a document is a label alone.
            if data._varied and label == data.end:
                found[-1].append(int(label))
    return [data.tokenizer.decode(one) for one in found]


@pytest.mark.parametrize("varied", [False, True])
def test_every_token_is_in_one_sequence(folder: Path, varied: bool) -> None:
    data = packed(folder, varied=varied)
    order = [texts()[n] for n in (0, 2, 4, 6, 1, 3, 5)]
    assert sorted(documents_of(data)) == sorted(order)
    assert varied or documents_of(data) == order
    assert varied or {len(ids) for ids, _, _ in data} == {16}  # type: ignore[attr-defined]
    rest, out = data.hold_out(3)
    assert documents_of(out) == [order[2], order[5]]
    assert len(documents_of(rest)) == 5
    with pytest.raises(IndexError):
        data[len(data)]
    with pytest.raises(ConfigError, match="no document in this part"):
        data.hold_out(8)


def test_varied_sequences_of_a_batch_are_padded(folder: Path) -> None:
    data = packed(folder, varied=True, multiple=6, length=40)
    ids, documents, labels = data.collate([data[0], data[2]])
    longest = len(data[2][0])
    assert ids.shape == documents.shape == labels.shape == (2, -(-longest // 6) * 6)
    behind = documents == tokens_of_text._PADDING
    assert (labels[behind] == tokens_of_text.IGNORED).all()
    assert behind[0].sum() == ids.shape[1] - len(data[0][0])
    loader = DataLoader(data, batch_size=2, shuffle=True, collate_fn=data.collate)
    rows = [[part.numpy() for part in batch] for batch in loader]
    loader.set_epoch(0)
    states = [loader.state_dict() for _, _ in zip(range(2), loader)]
    resumed = DataLoader(data, batch_size=2, shuffle=True, collate_fn=data.collate)
    resumed.set_state_dict(json.loads(json.dumps(states[-1])))
    again = [[part.numpy() for part in batch] for batch in resumed]
    for batch, other in zip(rows[2:], again, strict=True):
        assert all(np.array_equal(one, two) for one, two in zip(batch, other))


def sequences_of(folder: Path) -> tuple[list[Any], int]:
    """Packs a text; returns its first sequence, and how many times this process wrote tokens."""
    writes, write = [], tokens_of_text._write_tokens
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            tokens_of_text, "_write_tokens", lambda *args: (writes.append(1), write(*args))
        )
        return [part.tolist() for part in packed(folder)[3]], len(writes)


def test_one_of_several_processes_writes(folder: Path, on_ranks: Call) -> None:
    """The others wait for its lock, and all read the same."""
    found, writes = zip(*on_ranks(sequences_of, 3, folder))
    assert sorted(writes) == [0, 0, 1]
    assert found[0] == found[1] == found[2]
    assert sequences_of(folder) == (found[0], 0)
    # Of another text, or with another tokenizer, the tokens are others.
    (folder / "0.txt").write_text("other words")
    assert sequences_of(folder)[1] == 1
    packed(folder, vocabulary=270)
    assert len([*(folder.parent / "cache").glob("*/tokens.bin")]) == 3


def test_a_dataset_of_hugging_face(folder: Path, monkeypatch: Patch) -> None:
    arrow = pytest.importorskip("pyarrow", reason="a dataset needs it")
    saved = folder.parent / "saved"
    saved.mkdir()
    table = arrow.table({"id": [*range(7)], "text": texts()})
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, part in zip(names, (table[:4], table[4:])):
        file = arrow.OSFile(str(saved / name), "wb")
        with file, arrow.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(part)
    state = {"_data_files": [{"filename": name} for name in names]}
    (saved / "state.json").write_text(json.dumps(state))
    assert documents_of(packed(saved)) == texts()
    for column in ("body", "id"):
        with pytest.raises(ConfigError, match=rf"(?s)no column '{column}'.*one of text"):
            packed(saved, column=column)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(PackageNotFound, match="pip install pyarrow"):
        packed(saved, vocabulary=275)


@pytest.mark.parametrize("text", ['{"player": "Ann", "level": 3}', "[1, 2]", "{"])
def test_a_document_may_be_called_as_the_list_of_a_dataset(folder: Path, text: str) -> None:
    (folder / "state.json").write_text(text)
    assert text in documents_of(packed(folder))


def test_a_tokenizer_of_the_users(folder: Path) -> None:
    trained = packed(folder)
    file = folder.parent / "tokenizer.json"
    trained.tokenizer.save(str(file))
    data = packed(folder, tokenizer=file)
    assert documents_of(data) == documents_of(trained)
    with pytest.raises(ConfigError, match=r"no token '</s>'(?s:.*)end='<\|endoftext\|>'"):
        packed(folder, tokenizer=file, end="</s>")
    cutting = tokenizers.Tokenizer.from_file(str(file))
    cutting.enable_truncation(4)
    cutting.enable_padding(length=9)
    assert documents_of(packed(folder, tokenizer=cutting)) == documents_of(trained)
    assert cutting.truncation
    words = {**{word: 70_000 + n for n, word in enumerate(WORDS)}, tokens_of_text.END: 2}
    far = tokenizers.Tokenizer(tokenizers.models.WordLevel(words))
    far.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    far.add_special_tokens([tokens_of_text.END])
    assert sorted(documents_of(packed(folder, tokenizer=far))) == sorted(texts())


FILES = ["tokens.bin", "ends.npy", "contents.json", "tokenizer.json"]
DAMAGES: list[Callable[[bytes], bytes]] = [lambda whole: whole[:-8], lambda _: b"", lambda _: b"[]"]


@pytest.mark.parametrize(
    ("name", "damaged"),
    [
        *product(FILES, DAMAGES),
        ("contents.json", lambda whole: whole.replace(b"uint16", b"uint8")),
        ("contents.json", lambda whole: whole.replace(b'"end": ', b'"end": 1')),
    ],
)
def test_damaged_files_are_refused(
    folder: Path, name: str, damaged: Callable[[bytes], bytes]
) -> None:
    packed(folder)
    (file,) = (folder.parent / "cache").glob(f"*/{name}")
    file.write_bytes(damaged(file.read_bytes()))
    with pytest.raises(CheckpointError, match=r"(?s)damaged.*remove that folder"):
        packed(folder)


def test_a_text_about_the_token_that_ends_documents(folder: Path) -> None:
    (folder / "0.txt").write_text("it is <|endoftext|> that ends")
    data = packed(folder)
    assert documents_of(data)[0] == "it is <|endoftext|> that ends"
    tokenizer = tokenizers.Tokenizer.from_str(data.tokenizer.to_str())  # as a user's own
    with pytest.raises(ConfigError, match=r"(?s)within it.*that ends"):
        packed(folder, folder.parent / "other", tokenizer=tokenizer)


def test_a_text_without_a_space_trains_a_tokenizer(folder: Path) -> None:
    letters = np.random.default_rng(1).integers(97, 123, 300_000).astype("uint8").tobytes()
    (folder / "0.txt").write_bytes(letters)
    data = packed(folder, vocabulary=1000)
    assert documents_of(data)[0].encode() == letters


def test_what_is_no_text_is_refused(folder: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    wide = tmp_path / "wide"
    wide.mkdir()
    (wide / "a.txt").write_bytes("wide".encode("utf-16-le"))
    for change, text in (
        ({"folder": tmp_path / "nowhere"}, "nowhere(?s:.*)No such file"),
        ({"folder": folder / "0.txt"}, r"0\.txt(?s:.*)Not a directory"),
        ({"folder": empty}, "no text in this folder"),
        ({"folder": wide}, "NUL bytes"),
        ({"cache": folder / "tokens"}, "no part of the text"),
        ({"length": 0}, "length"),
        ({"vocabulary": 10}, "vocabulary(?s:.*)such as 257"),
        ({"tokenizer": folder / "none.json"}, r"none\.json(?s:.*)No such file"),
        ({"tokenizer": str.split}, "Tokenizer of the tokenizers package"),
    ):
        with pytest.raises(ConfigError, match=text):
            packed(**{"folder": folder, **change})
    (folder / "picture.png").write_bytes(b"\x89PNG\xff")
    with pytest.raises(ConfigError, match=r"picture\.png(?s:.*)no text in UTF-8"):
        packed(folder)
    (empty / "state.json").write_text('{"_data_files": [{"filename": "/data/part-0.arrow"}]}')
    with pytest.raises(ConfigError, match=r"files outside of its folder(?s:.*)part-0\.arrow"):
        packed(empty)
    (empty / "state.json").unlink()
    (empty / "blank.txt").touch()
    with pytest.raises(ConfigError, match="no document that is not empty"):
        packed(empty)
