"""Shows the progress of a run: a bar in a terminal, lines in a file."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from fleetpipe.fit.callbacks import rank_policy
from fleetpipe.paddle_api import paddle
from fleetpipe.representation import shows

#: Seconds from one line to the next, with ``verbose=1`` and without a terminal.
_SECONDS_OF_A_LINE = 10.0
#: The most seconds to the end of a training for which the end is shown.
_FAR = 1e9
#: Without tqdm's own times and rate, which are those of batches of one epoch.
_FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}"
_FORMAT_OF_UNKNOWN = "{desc}: {n_fmt}{postfix}"
#: The least width of the bar itself, and the width of a terminal whose width is unknown.
_BAR, _WIDTH = 8, 80
#: The ends of texts that are shown before others in a narrow terminal.
_FIRST = (" samples/s", " left")


@shows("verbose", "log_freq")
class Progress(paddle.callbacks.ProgBarLogger):
    """The progress of a ``Model``'s loops, in place of Paddle's ``ProgBarLogger``.

    The first rank of the job shows loss and metrics, samples a second of all replicas together, the
    time that is left of the whole training, and when it ends. With ``verbose=1`` it shows a bar if
    standard error is a terminal, else a line every ten seconds, as under a launcher; with
    ``verbose=2`` a line every ``log_freq`` batches. The end of an epoch has a line too.
    """

    model: Any

    def __init__(self, log_freq: int = 10, verbose: int = 1) -> None:
        """Configures how often to show progress.

        Args:
            log_freq: Batches from one line to the next.
            verbose: 0 shows nothing, 1 a bar, 2 lines.
        """
        super().__init__(log_freq, verbose)
        self._with_bar = verbose == 1 and sys.stderr.isatty()
        self._bar: tqdm | None = None
        self._what = ""
        self._names: list[str] = []
        self._steps: int | None = None
        self._done = self._samples = 0
        self._begun = self._shown_at = 0.0
        #: Batches of this training that have run, and that will still run; None if unknown.
        self._trained = 0
        self._to_come: int | None = None
        self._training_since = 0.0

    def on_train_begin(self, logs: Any = None) -> None:
        """Starts the clock that estimates the end of the training."""
        self._trained, self._training_since = 0, time.perf_counter()

    def on_train_batch_begin(self, step: int, logs: Any = None) -> None:
        """Shows nothing before a batch."""

    on_eval_batch_begin = on_predict_batch_begin = on_train_batch_begin

    def on_epoch_begin(self, epoch: int | None = None, logs: Any = None) -> None:
        """Starts the bar of an epoch."""
        number, epochs, steps = epoch or 0, self.params["epochs"], self.params["steps"]
        done = logs.get("step", 0)
        self._to_come = None if steps is None else (epochs - number) * steps - done
        self._begin(f"epoch {number + 1}/{epochs}", steps, done)

    def on_eval_begin(self, logs: Any = None) -> None:
        """Starts the bar of an evaluation."""
        self._begin("evaluation", logs.get("steps"))

    def on_predict_begin(self, logs: Any = None) -> None:
        """Starts the bar of a prediction."""
        self._begin("prediction", logs.get("steps"))

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        """Counts a training batch, and shows a line if one is due."""
        self._trained += 1
        if self._to_come is not None:
            self._to_come -= 1
        self._batch_end(logs)

    def on_eval_batch_end(self, step: int, logs: Any = None) -> None:
        """Counts another batch, and shows a line if one is due."""
        self._batch_end(logs)

    on_predict_batch_end = on_eval_batch_end

    def _batch_end(self, logs: Any) -> None:
        """Counts a batch; updates the bar, or shows a line if one is due."""
        self._samples += logs["batch_size"]
        self._done += 1
        now = time.perf_counter()
        if self._bar is not None:
            if now - self._shown_at >= self._bar.mininterval:
                # Only as often as tqdm draws the bar, since the texts take time.
                self._shown_at = now
                self._show(self._bar, logs)
            self._bar.update()
        elif self._done != self._steps and (
            now - self._shown_at >= _SECONDS_OF_A_LINE
            if self.verbose == 1
            else self._done % self.log_freq == 0
        ):
            self._shown_at = now
            self._line(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Shows the epoch's last figures, and ends its bar."""
        self._end(logs)

    def on_eval_end(self, logs: Any = None) -> None:
        """Shows the last figures of an evaluation or a prediction, and ends its bar."""
        self._end(logs)

    on_predict_end = on_eval_end

    def on_train_end(self, logs: Any = None) -> None:
        """Shows nothing, since the end of the last epoch has a line."""

    def close(self) -> None:
        """Ends the line of the bar in the terminal, if there is one."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _is_shown(self) -> bool:
        return bool(self.verbose) and self.model.is_rank("first")

    def _begin(self, what: str, steps: int | None, done: int = 0) -> None:
        """Starts the bar of a loop of ``steps`` batches, of which ``done`` are done."""
        self._what, self._steps, self._done = what, steps, done
        self._samples = 0
        self._begun = time.perf_counter()
        # The time of the last line is kept from one epoch to the next.
        self._shown_at = self._shown_at or self._begun
        self._names = self.model.metric_names
        if self._is_shown() and self._with_bar:
            form = _FORMAT_OF_UNKNOWN if steps is None else _FORMAT
            self._bar = tqdm(
                total=steps, initial=done, desc=what, dynamic_ncols=True, bar_format=form
            )

    def _end(self, logs: Any) -> None:
        """Shows the last figures in the bar or in a line, and ends the bar."""
        if self._bar is not None:
            if self._done:
                self._show(self._bar, logs)
            self.close()
        elif self._done:
            self._line(logs)

    def _line(self, logs: Any) -> None:
        if self._is_shown():
            steps = "" if self._steps is None else f"/{self._steps}"
            rank_policy.say(
                f"{self._what}, batch {self._done}{steps}: {', '.join(self._texts(logs))}"
            )

    def _show(self, bar: tqdm, logs: Any) -> None:
        """Shows the texts that fit beside the bar; loss, rate and time left are chosen first."""
        head = f"{self._what}: 100%|| {self._steps}/{self._steps}, "
        width = (bar.format_dict["ncols"] or _WIDTH) - len(head) - _BAR
        texts = self._texts(logs)
        first = [text for text in texts if text.startswith("loss ") or text.endswith(_FIRST)]
        kept = [*first, *(text for text in texts if text not in first)]
        while len(", ".join(kept)) >= width and kept:
            kept.pop()
        bar.set_postfix_str(", ".join(text for text in texts if text in kept), refresh=False)

    def _texts(self, logs: Any) -> list[str]:
        """Returns the loss, the metrics, the rate and the end of the training as texts."""
        rate = self._samples / (time.perf_counter() - self._begun)
        values = [(name, logs[name]) for name in self._names if name in logs]
        shown = [f"{n} {v[0] if isinstance(v, list) else v:.4g}" for n, v in values]
        speed = f"{rate:.0f}" if rate >= 1e4 else f"{rate:.4g}"
        return [*shown, f"{speed} samples/s", *self._end_of_training()]

    def _end_of_training(self) -> list[str]:
        """Estimates the time that is left of a training; empty if its length is unknown."""
        if not self._to_come or not self._trained:
            return []
        left = self._to_come / self._trained * (time.perf_counter() - self._training_since)
        if left > _FAR:
            return []
        clock = time.strftime("%H:%M:%S", time.localtime(time.time() + left))
        return [f"{tqdm.format_interval(left)} left", f"ends {clock}"]


@contextmanager
def closing_bars(callbacks: Sequence[Any]) -> Iterator[None]:
    """Closes the bars of the callbacks at the end of the context, also after Ctrl-C or an error."""
    try:
        yield
    finally:
        for callback in callbacks:
            if isinstance(callback, Progress):
                callback.close()
