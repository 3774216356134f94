"""``PackedText``: a dataset of token sequences, in which documents are kept apart."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fleetpipe.contrib.text.documents import documents_in
from fleetpipe.contrib.text.token_files import END, token_files
from fleetpipe.errors import ConfigError, require_whole
from fleetpipe.extras import needed_for
from fleetpipe.paddle_api import paddle
from fleetpipe.representation import shows

#: The label of a position that the loss leaves out, as in ``nn.CrossEntropyLoss``.
IGNORED = -100
#: The document of positions behind the last token.
_PADDING = -1


@shows("length", "end")
class PackedText(paddle.io.Dataset):  # type: ignore[type-arg, unused-ignore]  # 2.6.2 takes no argument
    """Sequences of tokens from a text; each is ``ids, documents, labels``, all ``[length]``.

    ``documents`` numbers the documents of a sequence, for
    :func:`fleetpipe.dygraph.sequences.attention`; -1 is behind the last token. ``labels`` are the
    tokens that follow, and -100 where a document ends.

    Every rank makes it alike. The tokens are packed once, by one process of a host, and mapped into
    memory by all. A :class:`fleetpipe.io.DataLoader`, and ``fit``, give each replica its own
    sequences, and go on at a sequence.

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
        """Opens the tokens of a text, or makes them.

        Args:
            text: A folder in which each file is a document, or one of ``datasets``'
                ``save_to_disk``; None is the documentation of Python's standard library.
            cache: A folder for the tokens.
            length: Most positions of a sequence.
            tokenizer: A ``tokenizers.Tokenizer``, or the path of its file. None trains one of byte
                pairs on the text.
            vocabulary: Most tokens of one that is trained.
            end: The name of the token that ends a document.
            column: The column of a dataset that has the documents.
            varied: Whether a sequence is a document, or a part of a longer one, and as long as
                that. Otherwise documents follow each other, and all sequences are full.
            multiple: What varied sequences of a batch are padded to a multiple of.

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
        self._use(np.concatenate([[0], ends[:-1]]).astype("int64"), ends)

    def _use(self, begins: np.ndarray, ends: np.ndarray) -> None:
        """Makes these documents, by their positions in the tokens, those of the sequences."""
        if not len(begins):
            raise ConfigError("there is no document in this part", fix="a smaller hold_out(each)")
        self._begins, self._ends = begins, ends
        sizes = ends - begins
        #: The number of sequences, or else of tokens, before each document, and of all.
        units = -(-(sizes - 1) // self.length) if self._varied else sizes
        self._before = np.concatenate([[0], units.cumsum()])

    def hold_out(self, each: int = 20) -> tuple[PackedText, PackedText]:
        """Returns a dataset without every ``each``-th document, and one of these alone.

        Raises:
            ConfigError: There are fewer documents.
        """
        require_whole("each", each, 2)
        out = np.arange(1, len(self._begins) + 1) % each == 0
        parts = copy.copy(self), copy.copy(self)
        for part, chosen in zip(parts, (~out, out)):
            part._use(self._begins[chosen], self._ends[chosen])
        return parts

    def __len__(self) -> int:
        """The number of sequences."""
        return int(self._before[-1] if self._varied else -(-(self._before[-1] - 1) // self.length))

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns a sequence: ids int64, documents int32 and labels int64, each ``[length]``."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        tokens, documents = self._varied_window(index) if self._varied else self._window(index)
        kept = (documents[1:] == documents[:-1]) & (documents[1:] != _PADDING)
        return tokens[:-1], documents[:-1], np.where(kept, tokens[1:], IGNORED)

    def _varied_window(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        document = int(np.searchsorted(self._before, index, "right")) - 1
        begin = self._begins[document] + (index - self._before[document]) * self.length
        end = min(begin + self.length + 1, self._ends[document])
        return self._tokens[begin:end].astype("int64"), np.zeros(end - begin, "int32")

    def _window(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.full(self.length + 1, self.end, "int64")
        documents = np.full(self.length + 1, _PADDING, "int32")
        place, last = index * self.length, int(self._before[-1])
        document = first = int(np.searchsorted(self._before, place, "right")) - 1
        filled = 0
        while filled <= self.length and place < last:
            begin = self._begins[document] + place - self._before[document]
            taken = self._tokens[begin : self._ends[document]][: self.length + 1 - filled]
            tokens[filled : filled + len(taken)] = taken
            documents[filled : filled + len(taken)] = document - first
            filled, place, document = filled + len(taken), place + len(taken), document + 1
        return tokens, documents

    def collate(self, samples: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
        """Returns a batch of varied sequences, all as long as the longest or a bit longer.

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
