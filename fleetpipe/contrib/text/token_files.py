"""The tokens of some documents in files that every rank maps into memory.

One process of a host writes them, in a draft that appears whole; the others wait for its lock. The
name of the folder says of which text and which tokenizer they are, so what changes one of these
gives another folder.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from fleetpipe import systems
from fleetpipe.arguments import using
from fleetpipe.atomic_file import appearing
from fleetpipe.contrib.text.documents import Documents
from fleetpipe.errors import CheckpointError, ConfigError
from fleetpipe.log import logger

#: Documents that are made tokens together.
_TOGETHER = 256
_FORMAT = 2
#: Characters without a space that a tokenizer is trained on as one word: training takes a time that
#: grows with the square of it.
_LONGEST_WORD = 256
#: The name of the token that ends a document, in a tokenizer that is trained here.
END = "<|endoftext|>"

#: A ``tokenizers.Tokenizer``; the tokens of all documents, each with the token that ends it; the
#: position after each document; and that token.
TokenFiles = tuple[Any, np.ndarray, np.ndarray, int]


def token_files(
    documents: Documents, cache: Path, tokenizer: Any, vocabulary: int, end: str
) -> TokenFiles:
    """Returns the tokens of documents, for ``PackedText``; the first process to come writes them.

    Raises:
        CheckpointError: The files are damaged.
        ConfigError: The folder cannot be written, or the tokenizer has no token of this name.
    """
    said = f"trained {vocabulary} {end}" if tokenizer is None else tokenizer.to_str()
    facts = json.dumps([_FORMAT, documents.identity, said, end])
    folder = cache / hashlib.sha256(facts.encode()).hexdigest()[:16]
    with using("cache", cache, "a folder that can be written"):
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / "lock").open("ab") as lock:
            systems.lock(lock.fileno())
            if not folder.exists():
                logger(__name__).info("packing text into %s, once", folder)
                tokenizer = tokenizer or _train_tokenizer(documents, vocabulary, end)
                with appearing(folder) as draft:
                    _write(draft, documents, tokenizer, _token(tokenizer, end))
    return _open(folder)


def _train_tokenizer(documents: Documents, vocabulary: int, end: str) -> Any:
    """Trains a tokenizer of byte pairs, as GPT-2's, which any text can be made tokens with."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.encode_special_tokens = True  # a document may have the name of `end` as text
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[end],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    longer = re.compile(rf"\S{{{_LONGEST_WORD}}}")
    tokenizer.train_from_iterator((longer.sub(r"\g<0> ", d) for d in documents.read()), trainer)
    return tokenizer


def _token(tokenizer: Any, name: str) -> int:
    token: int | None = tokenizer.token_to_id(name)
    if token is None:
        added = [each.content for each in tokenizer.get_added_tokens_decoder().values()]
        raise ConfigError(
            f"the tokenizer has no token {name!r} to end a document with",
            expected=f"one of {', '.join(added) or 'its vocabulary'}",
            fix=f"end={added[-1] if added else '..'!r}",
        )
    return token


def _write(draft: Path, documents: Documents, tokenizer: Any, end: int) -> None:
    # Tokens may be further apart than their number says.
    dtype = np.dtype("uint16" if max(tokenizer.get_vocab().values()) < 1 << 16 else "uint32")
    text = tokenizer.to_str()
    (draft / "tokenizer.json").write_text(text, encoding="utf-8")
    digest, ends, total = hashlib.sha256(f"{dtype.name} {end} {text}".encode()), [], 0
    with (draft / "tokens.bin").open("wb") as file:
        for encoding in _encodings(documents, tokenizer):
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


def _encodings(documents: Documents, tokenizer: Any) -> Iterator[Any]:
    """Yields the tokens of whole documents, which a tokenizer may cut or pad for a model."""
    from tokenizers import Tokenizer

    whole = Tokenizer.from_str(tokenizer.to_str())
    whole.no_truncation()
    whole.no_padding()
    whole.encode_special_tokens = tokenizer.encode_special_tokens
    texts = documents.read()
    while some := [*islice(texts, _TOGETHER)]:
        yield from whole.encode_batch(some, add_special_tokens=False)


def _open(folder: Path) -> TokenFiles:
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
