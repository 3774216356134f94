"""One hash of a model, the same for every layout of ranks: a SHA-256 over its tensors by name.

Every tensor has a digest: the SHA-256 of the line ``float32 [256, 768]``, its dtype as Paddle names
it and the shape of the whole, and of all its bytes, row after row, little-endian. The hash is the
SHA-256 of a line for each tensor, ``<digest>  <name>``, sorted by name; every line ends in LF. All
is UTF-8. The tensors are those of the model's ``state_dict`` under their fully qualified names:
parameters, a tied one once, and persistent buffers, as no file says which is which; of running
statistics those of the first replica. The optimizer's state is not among them.

So ranks exchange digests, no values, and the lines can be compared to find what differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fleetpipe.mesh.parts import Described

#: Hex digits of a hash where it stands among other figures.
SHORT = 12


def tensor_digest(tensor: Described, parts: Iterable[Any]) -> str:
    """Returns the digest of a tensor.

    Args:
        tensor: Its dtype and shape.
        parts: All its bytes, in some pieces.
    """
    digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}\n".encode())
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def lines(digests: Mapping[str, str]) -> Iterator[str]:
    """Yields the lines of which the hash is made, without their ends.

    Args:
        digests: The digest of each tensor by name.
    """
    return (f"{digest}  {name}" for name, digest in sorted(digests.items()))


def hash_of(digests: Mapping[str, str]) -> str:
    """Returns the hash of a model, 64 hex digits; the argument is that of :func:`lines`."""
    # A damaged file may have half a character of a pair in a name.
    text = "".join(f"{line}\n" for line in lines(digests))
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
