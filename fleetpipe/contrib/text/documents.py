"""Where documents come from: files of text, a Hugging Face dataset, or the standard library."""

from __future__ import annotations

import ast
import json
import sys
import sysconfig
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fleetpipe.arguments import using
from fleetpipe.errors import ConfigError, is_file_name
from fleetpipe.extras import needed_for

#: What of the standard library is no text about it.
_NO_MODULES = {"idlelib", "lib2to3", "site-packages", "test", "tests"}
_HAS_TEXT = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Documents(NamedTuple):
    """A source of documents.

    Attributes:
        identity: A text that changes when the documents do: names, sizes and times of the files.
        read: Yields the documents, always in the same order.
    """

    identity: str
    read: Callable[[], Iterator[str]]


def documents_in(folder: Path | None, column: str) -> Documents:
    """Returns the documents of a folder, for ``PackedText`` with these arguments.

    Raises:
        ConfigError: There is no such folder, it has no files, or is no part of a dataset.
    """
    if folder is None:
        return Documents(f"standard library {sys.version}", _standard_library)
    with using("text", folder, "a folder of text, or one that datasets has saved"):
        names = _files_of_dataset(folder / "state.json")
        if not all(map(is_file_name, names)):
            raise ConfigError(
                "a dataset names files outside of its folder",
                where=str(folder / "state.json"),
                got=", ".join(names)[:200],
                fix="save it again with datasets' save_to_disk; a document needs another name",
            )
        if names:
            files = [folder / name for name in names]
            read = partial(_read_dataset, folder, files, column)
        else:
            next(folder.iterdir(), None)  # rglob says nothing of one that is none
            files = sorted(path for path in folder.rglob("*") if _is_text(path, folder))
            read = partial(_read_texts, files)
        facts = [(path.relative_to(folder).as_posix(), path.stat()) for path in files]
    if not files or (folder / "dataset_dict.json").is_file():
        raise ConfigError(
            "there is no text in this folder",
            got=str(folder),
            expected="files of text, or state.json and the files of one dataset",
            fix=f"put files into it; of a DatasetDict give one part, such as {folder / 'train'}",
        )
    identity = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in facts]
    return Documents(json.dumps([column, identity]), read)


def _files_of_dataset(state: Path) -> list[str]:
    """Returns the files that a dataset lists; none for a document that has its name."""
    try:
        content = json.loads(state.read_text(encoding="utf-8"))
        return [str(each["filename"]) for each in content["_data_files"]]
    except (FileNotFoundError, ValueError, LookupError, TypeError, RecursionError):
        return []


def _is_text(path: Path, folder: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
    return path.is_file() and not hidden


def _read_texts(files: list[Path]) -> Iterator[str]:
    for path in files:
        with using("text", path, "a folder that has nothing but text"):
            text = path.read_text(encoding="utf-8-sig")
            if "\0" in text:
                raise ConfigError(
                    f"text: cannot use {path}",
                    cause="it has NUL bytes, as UTF-16 without a mark and files of numbers have",
                    fix="give a folder that has nothing but text in UTF-8",
                )
            yield text


def _read_dataset(folder: Path, files: list[Path], column: str) -> Iterator[str]:
    with needed_for(f"to read the dataset in {folder}"):
        import pyarrow as arrow
    for path in files:
        with arrow.memory_map(str(path)) as source, arrow.ipc.open_stream(source) as stream:
            texts = [field.name for field in stream.schema if "string" in str(field.type)]
            if column not in texts:
                raise ConfigError(
                    f"the dataset in {folder} has no column {column!r} of text",
                    expected=f"one of {', '.join(texts) or 'none: no column is text'}",
                    fix=f"column={[*texts, '..'][0]!r}",
                )
            for batch in stream:
                yield from (text for text in batch.column(column).to_pylist() if text)


def _standard_library() -> Iterator[str]:
    """Yields the help pages of the language, and what each module says of itself."""
    from pydoc_data.topics import topics

    yield from topics.values()
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if _NO_MODULES.isdisjoint(path.relative_to(root).parts):
            nodes = ast.walk(ast.parse(path.read_bytes()))
            texts = [ast.get_docstring(node) for node in nodes if isinstance(node, _HAS_TEXT)]
            if any(texts):
                yield "\n\n".join(text for text in texts if text)
