"""Chooses the next token from logits, with the same random number for every batch and layout."""

from __future__ import annotations

import math
import zlib
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from fleetpipe.dygraph.random_keys import key
from fleetpipe.errors import BoundaryError, ConfigError, require_whole


class Sampling(NamedTuple):
    """How a token is chosen, by the arguments of ``generate`` that have these names."""

    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int

    def require_valid(self) -> None:
        """Refuses values that choose no token."""
        temperature, top_k, top_p, seed = self
        if not (_is_number(temperature) and 0 <= temperature < math.inf):
            raise ConfigError(
                "temperature divides the logits: it is a number of at least 0",
                got=f"temperature={temperature!r}",
                fix="temperature=0 takes the likeliest token, 1 draws by the model's shares",
            )
        if top_k is not None:
            require_whole("top_k", top_k, fix="give a number such as 50, or None for all tokens")
        if top_p is not None and not (_is_number(top_p) and 0 < top_p <= 1):
            raise ConfigError(
                "top_p is the share that the likeliest tokens have together, above 0 and at most 1",
                got=f"top_p={top_p!r}",
                fix="give a number such as 0.9, or None for all tokens",
            )
        require_whole("seed", seed, 0)

    def choose(self, logits: np.ndarray[Any, Any], *place: int) -> int:
        """Returns a token.

        Args:
            logits: Float [vocabulary].
            place: The numbers from which, with the seed, the random number follows.

        Raises:
            BoundaryError: The logits have a NaN or an infinity, or no finite number.
        """
        if not math.isfinite(logits.max()):
            raise BoundaryError(
                "the logits of a next token are NaN or infinite",
                cause="a training that has diverged, or weights that were not loaded",
                fix="fleetpipe.callbacks.LossMonitor(find_layer=True) names the first layer of it",
            )
        if self.temperature == 0:
            return int(logits.argmax())
        below = logits.astype(np.float64) - logits.max()
        with np.errstate(over="ignore"):  # by a temperature near 0, which is the likeliest alone
            scaled = below / self.temperature
        # The likeliest first; of equal ones the first.
        order = np.argsort(-scaled, kind="stable")[: self.top_k]
        weights = np.exp(scaled[order])
        reached = np.cumsum(weights)
        if self.top_p is not None:
            reached = reached[: int(np.searchsorted(reached, self.top_p * reached[-1])) + 1]
        point = key(self.seed, *place) / 2**63 * reached[-1]
        return int(order[min(int(np.searchsorted(reached, point, "right")), len(reached) - 1)])


def names_of(prompts: list[list[int]]) -> list[tuple[int, int]]:
    """Returns two numbers for each prompt, from which its random numbers follow.

    They depend on its tokens, and on how many equal prompts stand before it: not on other prompts.
    """
    names: list[tuple[int, int]] = []
    for prompt in prompts:
        digest = zlib.crc32(np.asarray(prompt, np.int64).tobytes())
        names.append((digest, sum(digest == earlier for earlier, _ in names)))
    return names


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
