"""``fleetpipe.io.PackedText``: text as sequences of tokens, in which documents stay apart.

Documents (``documents_in``) come from files of text, a Hugging Face dataset, or the standard
library. Every rank maps files of their tokens into memory (``token_files``). One process of a host
writes these files into a draft, which is renamed when it is complete; the others wait for its lock.
The folder's name is a digest of text and tokenizer, so that another text gets another folder.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import json
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fleetpipe import systems
from fleetpipe.arguments import using
from fleetpipe.atomic_file import appearing
from fleetpipe.errors import CheckpointError, ConfigError, is_file_name, require_whole
from fleetpipe.extras import needed_for
from fleetpipe.log import logger
from fleetpipe.paddle_api import paddle
from fleetpipe.representation import shows

__all__ = ["PackedText"]


#: The folders of the standard library that are left out.
_SKIPPED_FOLDERS = {"idlelib", "lib2to3", "site-packages", "test", "tests"}
_DOCUMENTED_NODES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

#: How many documents are tokenized at a time.
_BATCH_OF_DOCUMENTS = 256
#: The version of the files of tokens.
_FORMAT_VERSION = 2
#: The most characters of a word in training a tokenizer, whose time grows with their square.
_LONGEST_WORD = 256
#: The name of the token that ends a document, in a tokenizer that is trained here.
END = "<|endoftext|>"

#: A ``tokenizers.Tokenizer``; the tokens of all documents, each followed by the end token; the
#: position after each document; and the end token.
TokenFiles = tuple[Any, np.ndarray, np.ndarray, int]

#: The label of a position that the loss leaves out, as in ``nn.CrossEntropyLoss``.
IGNORED = -100
#: The document number of positions after the last token.
_PADDING = -1


class Documents(NamedTuple):
    """A source of documents.

    Attributes:
        identity: A text that changes when the documents change: names, sizes and times of the
            files.
        read: Yields the documents, always in the same order.
    """

    identity: str
    read: Callable[[], Iterator[str]]


def documents_in(folder: Path | None, column: str) -> Documents:
    """Returns the documents of a folder.

    Args:
        folder: A folder of texts, or of a dataset; None for the documentation of Python's standard
            library.
        column: The column of a dataset that has the documents.

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
            next(folder.iterdir(), None)  # raises for a path that is no folder, unlike rglob
            files = []
            for path in sorted(folder.rglob("*"), key=lambda path: path.relative_to(folder)):
                is_hidden = any(part[0] == "." for part in path.relative_to(folder).parts)
                if not is_hidden and path.is_file():
                    files.append(path)
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
    """Returns the files that a saved dataset lists in ``state``, its ``state.json``.

    The list is empty if there is no such file, or if it is not that of a dataset.
    """
    try:
        content = json.loads(state.read_text(encoding="utf-8"))
        return [str(each["filename"]) for each in content["_data_files"]]
    except (FileNotFoundError, ValueError, LookupError, TypeError, RecursionError):
        return []


def _read_texts(files: list[Path]) -> Iterator[str]:
    """Yields the text of each file, which must be UTF-8."""
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
    """Yields the texts in a column of a dataset's Arrow files, without empty ones."""
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
    """Yields the help pages of the language, and the docstrings of each module."""
    from pydoc_data.topics import topics

    yield from topics.values()
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if _SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts):
            nodes = ast.walk(ast.parse(path.read_bytes()))
            texts = [
                ast.get_docstring(node) for node in nodes if isinstance(node, _DOCUMENTED_NODES)
            ]
            if any(texts):
                yield "\n\n".join(text for text in texts if text)


def token_files(
    documents: Documents, cache: Path, tokenizer: Any, vocabulary: int, end: str
) -> TokenFiles:
    """Returns the tokens of documents; the first process of a host that needs these writes them.

    Args:
        documents: The documents.
        cache: The folder for the files of tokens.
        tokenizer: The tokenizer; None: one is trained on the documents.
        vocabulary: The most tokens of a tokenizer that is trained.
        end: The name of the token that ends a document.

    Raises:
        CheckpointError: The files are damaged.
        ConfigError: The folder cannot be written, or the tokenizer has no token of this name.
    """
    of_tokenizer = f"trained {vocabulary} {end}" if tokenizer is None else tokenizer.to_str()
    facts = json.dumps([_FORMAT_VERSION, documents.identity, of_tokenizer, end])
    folder = cache / hashlib.sha256(facts.encode()).hexdigest()[:16]
    with using("cache", cache, "a folder that can be written"):
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / "lock").open("ab") as lock:
            systems.lock(lock.fileno())
            if not folder.exists():
                logger(__name__).info("packing text into %s, once", folder)
                tokenizer = tokenizer or _train_tokenizer(documents, vocabulary, end)
                with appearing(folder) as draft:
                    _write_tokens(draft, documents, tokenizer, _token_number(tokenizer, end))
    return _open_tokens(folder)


def _train_tokenizer(documents: Documents, vocabulary: int, end: str) -> Any:
    """Trains a tokenizer of byte pairs, such as GPT-2's, which takes any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.encode_special_tokens = True  # the name of `end` in a document is plain text
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[end],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    longer = re.compile(rf"\S{{{_LONGEST_WORD}}}")
    tokenizer.train_from_iterator((longer.sub(r"\g<0> ", d) for d in documents.read()), trainer)
    return tokenizer


def _token_number(tokenizer: Any, name: str) -> int:
    """Returns the number of a token; raises ConfigError if the tokenizer does not have it."""
    token: int | None = tokenizer.token_to_id(name)
    if token is None:
        added = [each.content for each in tokenizer.get_added_tokens_decoder().values()]
        raise ConfigError(
            f"the tokenizer has no token {name!r} to end a document with",
            expected=f"one of {', '.join(added) or 'its vocabulary'}",
            fix=f"end={added[-1] if added else '..'!r}",
        )
    return token


def _write_tokens(draft: Path, documents: Documents, tokenizer: Any, end: int) -> None:
    """Writes the files of tokens into a folder, with a digest of all.

    Raises:
        ConfigError: A document has the token ``end`` in it, or there is no text.
    """
    # The numbers of tokens may have gaps.
    dtype = np.dtype("uint16" if max(tokenizer.get_vocab().values()) < 1 << 16 else "uint32")
    text = tokenizer.to_str()
    (draft / "tokenizer.json").write_text(text, encoding="utf-8")
    digest, ends, total = hashlib.sha256(f"{dtype.name} {end} {text}".encode()), [], 0
    with (draft / "tokens.bin").open("wb") as file:
        for encoding in _encode_documents(documents, tokenizer):
            if end in encoding.ids:
                raise ConfigError(
                    "a document has the token that ends documents within it",
                    got=tokenizer.decode(encoding.ids, skip_special_tokens=False)[:200],
                    fix="remove that text, or take another end=: PackedText puts one behind each "
                    "document",
                )
            if encoding.ids:
                data = np.array([*encoding.ids, end], dtype).tobytes()
                digest.update(data)
                file.write(data)
                total += len(encoding.ids) + 1
                ends.append(total)
    if not ends:
        raise ConfigError("the text has no document that is not empty", fix="give more text")
    np.save(draft / "ends.npy", np.array(ends, "int64"))
    digest.update(np.array(ends, "int64").tobytes())
    contents = {"dtype": dtype.name, "end": end, "sha256": digest.hexdigest()}
    (draft / "contents.json").write_text(json.dumps(contents), encoding="utf-8")


def _encode_documents(documents: Documents, tokenizer: Any) -> Iterator[Any]:
    """Yields the encoding of each document, without the tokenizer's truncation and padding."""
    from tokenizers import Tokenizer

    plain = Tokenizer.from_str(tokenizer.to_str())
    plain.no_truncation()
    plain.no_padding()
    plain.encode_special_tokens = tokenizer.encode_special_tokens
    texts = documents.read()
    while batch := [*islice(texts, _BATCH_OF_DOCUMENTS)]:
        yield from plain.encode_batch(batch, add_special_tokens=False)


def _open_tokens(folder: Path) -> TokenFiles:
    """Maps the files of tokens into memory, and compares their digest.

    Raises:
        CheckpointError: The files are damaged.
    """
    from tokenizers import Tokenizer

    try:
        contents = json.loads((folder / "contents.json").read_text(encoding="utf-8"))
        tokens = np.memmap(folder / "tokens.bin", contents["dtype"], "r")
        ends = np.load(folder / "ends.npy")
        text = (folder / "tokenizer.json").read_bytes()
        digest = hashlib.sha256(f"{contents['dtype']} {contents['end']} ".encode() + text)
        digest.update(tokens.data)
        digest.update(ends.tobytes())
        if digest.hexdigest() != contents["sha256"]:
            raise ValueError("another SHA-256")
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"the packed tokens are damaged: {folder}",
            expected="the files as they were written, by their SHA-256",
            fix="remove that folder: the text is packed again",
        ) from error
    return Tokenizer.from_buffer(text), tokens, ends, contents["end"]


@shows("length", "end")
class PackedText(paddle.io.Dataset):  # type: ignore[type-arg, unused-ignore]  # 2.6.2 takes no argument
    """Sequences of tokens from a text; each is ``ids, documents, labels``, all ``[length]``.

    ``documents`` numbers the documents of a sequence, for
    :func:`fleetpipe.dygraph.sequences.attention`; it is -1 after the last token. ``labels`` are the
    next tokens, and -100 where a document ends.

    Every rank constructs it in the same way. One process of a host packs the tokens, once, and all
    map them into memory. A :class:`fleetpipe.io.DataLoader`, and ``fit``, give each replica its own
    sequences, and resume at a sequence.

    Attributes:
        tokenizer: The ``tokenizers.Tokenizer``.
        end: The token that ends a document.
    """

    def __init__(
        self,
        text: Path | str | None = None,
        *,
        cache: Path | str,
        length: int,
        tokenizer: Any = None,
        vocabulary: int = 8192,
        end: str = END,
        column: str = "text",
        varied: bool = False,
        multiple: int = 64,
    ) -> None:
        """Opens the tokens of a text; makes them if they do not exist.

        Args:
            text: A folder in which each file is a document, or a dataset that ``datasets``'
                ``save_to_disk`` wrote; None is the documentation of Python's standard library.
            cache: A folder for the tokens.
            length: The most positions of a sequence.
            tokenizer: A ``tokenizers.Tokenizer``, or the path of its file. None trains one of byte
                pairs on the text.
            vocabulary: The most tokens of a tokenizer that is trained.
            end: The name of the token that ends a document.
            column: The column of a dataset that has the documents.
            varied: Whether each sequence is one document, or a part of a longer document. Otherwise
                documents follow each other, and all sequences are full.
            multiple: Varied sequences of a batch are padded to a multiple of this length.

        Raises:
            CheckpointError: The files of an earlier run are damaged.
            ConfigError: The text cannot be read, or an argument does not fit.
            PackageNotFound: ``tokenizers`` is not installed, or ``pyarrow`` for a dataset.
        """
        with needed_for("to make tokens of text"):
            from tokenizers import Tokenizer
        require_whole("length", length)
        require_whole("vocabulary", vocabulary, 257)
        require_whole("multiple", multiple)
        if text is not None and Path(cache).resolve().is_relative_to(Path(text).resolve()):
            raise ConfigError("the tokens are no part of the text", fix="cache: a folder elsewhere")
        if isinstance(tokenizer, (str, Path)):
            try:
                tokenizer = Tokenizer.from_file(str(tokenizer))
            except Exception as error:  # the package has no other
                raise ConfigError(f"tokenizer: cannot use {tokenizer}", cause=str(error)) from error
        if not isinstance(tokenizer, (Tokenizer, type(None))):
            raise ConfigError(
                "tokenizer: a Tokenizer of the tokenizers package, or the path of its file",
                got=type(tokenizer).__name__,
                fix="of a fast tokenizer of transformers, give its backend_tokenizer",
            )
        source = documents_in(None if text is None else Path(text), column)
        files = token_files(source, Path(cache), tokenizer, vocabulary, end)
        self.tokenizer, self._tokens, ends, self.end = files
        self.length, self._varied, self._multiple = length, varied, multiple
        self._select_documents(np.concatenate([[0], ends[:-1]]).astype("int64"), ends)

    def _select_documents(self, begins: np.ndarray, ends: np.ndarray) -> None:
        """Sets the documents: the index of each one's first token, and the index after the last."""
        if not len(begins):
            raise ConfigError("there is no document in this part", fix="a smaller hold_out(each)")
        self._begins, self._ends = begins, ends
        sizes = ends - begins
        #: For each document the number of units before it, and last the number of all units. A
        #: unit is a sequence if sequences are varied, else a token.
        units = -(-(sizes - 1) // self.length) if self._varied else sizes
        self._units_before = np.concatenate([[0], units.cumsum()])

    def hold_out(self, each: int = 20) -> tuple[PackedText, PackedText]:
        """Splits the documents: every ``each``-th is held out, for example for an evaluation.

        Returns:
            A dataset without these documents, and a dataset of them.

        Raises:
            ConfigError: There are fewer documents.
        """
        require_whole("each", each, 2)
        is_held_out = np.arange(1, len(self._begins) + 1) % each == 0
        rest, held_out = copy.copy(self), copy.copy(self)
        rest._select_documents(self._begins[~is_held_out], self._ends[~is_held_out])
        held_out._select_documents(self._begins[is_held_out], self._ends[is_held_out])
        return rest, held_out

    def __len__(self) -> int:
        """The number of sequences."""
        units = int(self._units_before[-1])
        return units if self._varied else -(-(units - 1) // self.length)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns a sequence: ids int64, documents int32 and labels int64, each ``[length]``."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        tokens, documents = (
            self._read_varied_sequence(index) if self._varied else self._read_full_sequence(index)
        )
        same_document = (documents[1:] == documents[:-1]) & (documents[1:] != _PADDING)
        return tokens[:-1], documents[:-1], np.where(same_document, tokens[1:], IGNORED)

    def _read_varied_sequence(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens of a varied sequence and their documents' numbers, which are 0.

        They are one more than the sequence has, for the last label.
        """
        document = int(np.searchsorted(self._units_before, index, "right")) - 1
        begin = self._begins[document] + (index - self._units_before[document]) * self.length
        end = min(begin + self.length + 1, self._ends[document])
        return self._tokens[begin:end].astype("int64"), np.zeros(end - begin, "int32")

    def _read_full_sequence(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens of a full sequence, and for each the number of its document there.

        They are one more than the sequence has, for the last label.
        """
        tokens = np.full(self.length + 1, self.end, "int64")
        documents = np.full(self.length + 1, _PADDING, "int32")
        # The position among the tokens of the dataset's documents.
        position, last = index * self.length, int(self._units_before[-1])
        document = first = int(np.searchsorted(self._units_before, position, "right")) - 1
        filled = 0
        while filled <= self.length and position < last:
            begin = self._begins[document] + position - self._units_before[document]
            piece = self._tokens[begin : self._ends[document]][: self.length + 1 - filled]
            tokens[filled : filled + len(piece)] = piece
            documents[filled : filled + len(piece)] = document - first
            filled, position, document = filled + len(piece), position + len(piece), document + 1
        return tokens, documents

    def collate(self, samples: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
        """Returns a batch of varied sequences, padded to a multiple of ``multiple``.

        Give it to a loader: ``DataLoader(text, batch_size, collate_fn=text.collate)``.
        """
        longest = max(len(ids) for ids, _, _ in samples)
        length = -(-longest // self._multiple) * self._multiple
        fills = (self.end, _PADDING, IGNORED)
        return [
            np.stack(
                [np.pad(part, (0, length - len(part)), constant_values=fill) for part in column]
            )
            for column, fill in zip(zip(*samples), fills)
        ]
