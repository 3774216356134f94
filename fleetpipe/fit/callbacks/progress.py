"""How far a run is: one bar in a terminal, a line every so often in a file."""

from __future__ import annotations

import sys
import time
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from fleetpipe.fit.callbacks import rank_policy
from fleetpipe.paddle_api import paddle
from fleetpipe.representation import shows


@shows("verbose", "log_freq")
class Progress(paddle.callbacks.ProgBarLogger):
    """What :class:`fleetpipe.Model` has in the place of Paddle's ``ProgBarLogger``.

    The first rank of the job shows it: loss and metrics, samples a second of all replicas together,
    and the time that is left. With ``verbose=1`` it is a bar where standard error is a terminal;
    elsewhere, and with ``verbose=2``, a line every ``log_freq`` batches and at the end.
    """

    model: Any

    def __init__(self, log_freq: int = 10, verbose: int = 1) -> None:
        """Takes how often to tell.

        Args:
            log_freq: Batches from one line to the next.
            verbose: 0 for silence, 1 for a bar, 2 for lines.
        """
        super().__init__(log_freq, verbose)
        self._with_bar = verbose == 1 and sys.stderr.isatty()
        self._bar: tqdm | None = None
        self._what = ""
        self._names: list[str] = []
        self._steps: int | None = None
        self._done = self._samples = 0
        self._begun = self._shown_at = 0.0

    def on_train_begin(self, logs: Any = None) -> None:
        """Begins."""

    def on_train_batch_begin(self, step: int, logs: Any = None) -> None:
        """Tells nothing before a batch."""

    on_eval_batch_begin = on_predict_batch_begin = on_train_batch_begin

    def on_epoch_begin(self, epoch: int | None = None, logs: Any = None) -> None:
        """Begins an epoch."""
        what = f"epoch {(epoch or 0) + 1}/{self.params['epochs']}"
        self._begin(what, self.params["steps"], logs.get("step", 0))

    def on_eval_begin(self, logs: Any = None) -> None:
        """Begins an evaluation."""
        self._begin("evaluation", logs.get("steps"))

    def on_predict_begin(self, logs: Any = None) -> None:
        """Begins a prediction."""
        self._begin("prediction", logs.get("steps"))

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        """Tells of a batch."""
        self._samples += logs["batch_size"]
        self._done += 1
        if self._bar is not None:
            now = time.perf_counter()
            if now - self._shown_at >= self._bar.mininterval:
                # No sooner is the bar drawn anew, and figures take time.
                self._shown_at = now
                self._bar.set_postfix_str(self._figures(logs), refresh=False)
            self._bar.update()
        elif self._done % self.log_freq == 0 and self._done != self._steps:
            self._line(logs)

    on_eval_batch_end = on_predict_batch_end = on_train_batch_end

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Tells how the epoch, or what else ended, came out."""
        self._end(logs)

    def on_eval_end(self, logs: Any = None) -> None:
        """Tells how the evaluation came out."""
        self._end(logs)

    on_predict_end = on_eval_end

    def on_train_end(self, logs: Any = None) -> None:
        """Has told everything."""

    def _is_shown(self) -> bool:
        return bool(self.verbose) and self.model.is_rank("first")

    def _begin(self, what: str, steps: int | None, done: int = 0) -> None:
        self._what, self._steps, self._done = what, steps, done
        self._samples = 0
        self._begun = time.perf_counter()
        self._names = self.model.metric_names
        if self._is_shown() and self._with_bar:
            self._bar = tqdm(total=steps, initial=done, desc=what, unit="batch", dynamic_ncols=True)

    def _end(self, logs: Any) -> None:
        if self._bar is not None:
            if self._done:
                self._bar.set_postfix_str(self._figures(logs), refresh=False)
            self._bar.close()
            self._bar = None
        elif self._done:
            self._line(logs)

    def _line(self, logs: Any) -> None:
        if self._is_shown():
            steps = "" if self._steps is None else f"/{self._steps}"
            rank_policy.say(f"{self._what}, batch {self._done}{steps}: {self._figures(logs)}")

    def _figures(self, logs: Any) -> str:
        rate = self._samples / (time.perf_counter() - self._begun)
        values = [(name, logs[name]) for name in self._names if name in logs]
        shown = [f"{n} {v[0] if isinstance(v, list) else v:.4g}" for n, v in values]
        return ", ".join([*shown, f"{rate:.4g} samples/s"])
