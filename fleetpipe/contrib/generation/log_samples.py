"""``LogSamples``: prints what a model writes, while it trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fleetpipe.contrib.generation.decoding import generate, prompts_of
from fleetpipe.errors import require_whole
from fleetpipe.fit.callbacks import rank_policy


class LogSamples(rank_policy.Callback):
    """Prints on the first rank how the model continues prompts: before training, then regularly.

    The training has the bits that it would have without it.
    """

    def __init__(
        self,
        tokens: Any,
        max_new_tokens: int,
        every: int | None = None,
        decode: Callable[[list[int]], str] = str,
        **options: Any,
    ) -> None:
        """Sets what is continued, and when.

        Args:
            tokens: The prompts, as for :func:`fleetpipe.generate`.
            max_new_tokens: As there.
            every: Batches from one time to the next; None for the end of each epoch.
            decode: Makes text of a prompt with its new tokens, as a tokenizer's method ``decode``.
            options: The other arguments of ``generate``.

        Raises:
            ConfigError: ``every`` is no whole number of at least 1, or there are no prompts.
        """
        super().__init__()
        self._every = None if every is None else require_whole("every", every)
        self._prompts, self._decode = prompts_of(tokens), decode
        self._options = {"max_new_tokens": max_new_tokens, **options}

    def on_train_begin(self, logs: Any = None) -> None:
        """Prints the first samples; arguments that do not fit are refused before the training."""
        self._print()

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        """Prints samples after every so many batches."""
        if self._every is not None and self.model.global_step % self._every == 0:
            self._print()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Prints samples after an epoch, unless they come after batches."""
        if self._every is None:
            self._print()

    def _print(self) -> None:
        new = generate(self.model, self._prompts, **self._options)
        if self.model.is_rank("first"):
            for prompt, tokens in zip(self._prompts, new):
                text = self._decode(prompt + tokens)
                rank_policy.say(f"sample after step {self.model.global_step}: {text}")
