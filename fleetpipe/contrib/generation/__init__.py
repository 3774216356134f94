"""Generates tokens with a pipeline: ``fleetpipe.generate``, and a callback that logs samples.

It continues prompts, one token of each in every run of the pipeline. ``Sampling`` chooses the next
token from logits, with the same random number for every batch and layout.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from fleetpipe.aliases import Nest, Tensor
from fleetpipe.contrib.slices import SliceStates, require_sliceable
from fleetpipe.dygraph import PipelineParallel
from fleetpipe.dygraph.batch.units import WHOLE, Units
from fleetpipe.dygraph.layer_kinds import kinds_in
from fleetpipe.dygraph.random_keys import hash_to_seed, random_states_kept
from fleetpipe.errors import BoundaryError, ConfigError, UsageError, is_whole_number, require_whole
from fleetpipe.fit.callbacks import rank_policy
from fleetpipe.fit.model import Model
from fleetpipe.job.job import Job
from fleetpipe.paddle_api import paddle


class Sampling(NamedTuple):
    """Chooses the next token from logits, by these arguments of :func:`generate`."""

    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int

    def require_valid(self) -> None:
        """Raises ConfigError if a value is out of its range."""
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

    def choose(self, logits: np.ndarray[Any, Any], *position: int) -> int:
        """Returns the next token of a sequence.

        Args:
            logits: Float [vocabulary].
            position: The sequence and the position in it, as numbers; with the seed they determine
                the random number.

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
        with np.errstate(over="ignore"):  # a temperature near 0 leaves the likeliest token alone
            scaled = below / self.temperature
        # The likeliest first; of equal ones the first.
        order = np.argsort(-scaled, kind="stable")[: self.top_k]
        weights = np.exp(scaled[order])
        reached = np.cumsum(weights)
        if self.top_p is not None:
            reached = reached[: int(np.searchsorted(reached, self.top_p * reached[-1])) + 1]
        # A random number below the sum of the weights: the token is the first whose sum exceeds it.
        point = hash_to_seed(self.seed, *position) / 2**63 * reached[-1]
        return int(order[min(int(np.searchsorted(reached, point, "right")), len(reached) - 1)])


def prompt_keys(prompts: list[list[int]]) -> list[tuple[int, int]]:
    """Returns for each prompt two numbers that seed the prompt's random numbers.

    These are a digest of the prompt's tokens, and the number of equal prompts before it. Thus the
    other prompts of a call do not matter.
    """
    keys: list[tuple[int, int]] = []
    for prompt in prompts:
        digest = zlib.crc32(np.asarray(prompt, np.int64).tobytes())
        keys.append((digest, sum(digest == earlier for earlier, _ in keys)))
    return keys


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def generate(
    model: Any,
    tokens: Any,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos: int | Collection[int] | None = None,
    seed: int = 0,
    cache: bool | None = None,
    inputs: Callable[[Tensor], Nest] = lambda tokens: tokens,
) -> list[list[int]]:
    """Continues prompts with the tokens that a model predicts. Collective over the job.

    The model takes tokens, int64 [1, length], and returns logits [1, length, vocabulary]. Each
    prompt is a micro-batch of its own, so that its tokens depend on no other prompt. The next
    training batch has the bits that it would have had without this call.

    Args:
        model: The result of ``fleet.distributed_model``, or a ``fleetpipe.Model`` after
            ``prepare``.
        tokens: The prompts, the same on every rank: a list of lists of tokens, or a Tensor or array
            [prompts, length] of whole numbers.
        max_new_tokens: The most new tokens of a prompt.
        temperature: Divides the logits before a token is drawn; 0 takes the likeliest token.
        top_k: Draws among so many of the likeliest tokens only.
        top_p: Draws among the fewest of the likeliest tokens whose probabilities add up to this.
        eos: The token, or several tokens, that end a continuation.
        seed: The seed of the random numbers. These depend on the seed, the prompt, the number of
            equal prompts before it, and the position, and on nothing else.
        cache: Whether layers keep the keys and values of earlier positions, by
            ``fleetpipe.dygraph.slices``; None: if all layers can. Without it each token takes a run
            over the whole sequence.
        inputs: Makes the model's inputs from the tokens of a run, such as ``lambda tokens: (tokens,
            mask)``: the tokens of the whole sequence, or with a cache the new ones alone.

    Returns:
        On every rank the new tokens of each prompt, the one of ``eos`` included.

    Raises:
        ConfigError: An argument does not fit, the ranks have different ones, a layer cannot keep
            what ``cache`` asks for, or the model returns no logits.
        StateError: ``fleet.shutdown`` ended the job of this model.
        UsageError: The model is not wrapped.
    """
    sampling = Sampling(temperature, top_k, top_p, seed)
    sampling.require_valid()
    require_whole("max_new_tokens", max_new_tokens)
    if not callable(inputs):
        raise ConfigError(
            "inputs makes what the model takes of the tokens of a run",
            got=f"inputs={inputs!r}",
            fix="give a function, such as lambda tokens: (tokens, mask)",
        )
    end_tokens, prompts = _end_tokens(eos), prompts_of(tokens)
    pipeline, computing = _require_pipeline(model)
    job = pipeline.require_running()
    key_value_cache = _new_cache(pipeline, cache)
    with job.calling("generates"):
        job.require_agreement(
            {
                **{f"prompt {number}": str(prompt) for number, prompt in enumerate(prompts)},
                **{name: repr(value) for name, value in sampling._asdict().items()},
                "max_new_tokens": str(max_new_tokens),
                "eos": str(sorted(end_tokens)),
                "cache": str(key_value_cache is not None),
            }
        )
    decoding = _Decoding(pipeline, job, sampling, prompts, key_value_cache, inputs)
    with _state_restored(pipeline), computing:
        unfinished = list(range(len(prompts)))
        while unfinished:
            decoding.advance(unfinished)
            unfinished = [
                number
                for number in unfinished
                if len(decoding.new[number]) < max_new_tokens
                and decoding.new[number][-1] not in end_tokens
            ]
    return decoding.new


class _Cache(Units, SliceStates):
    """Stores the keys and values of earlier positions for the layers of a model.

    Layers keep these values as they do under a schedule that cuts sequences into slices: the prompt
    is the first slice, and each new token another slice.
    """

    def __init__(self) -> None:
        SliceStates.__init__(self, 1)
        #: For each micro-batch of the next run, the number of its prompt.
        self.prompts: list[int] = []

    def states(self) -> SliceStates:
        """Returns the cache itself, as it keeps the values from one run to the next."""
        return self

    @contextmanager
    def forward(self, stage: int, number: int) -> Iterator[None]:
        """In this context, the layers of a stage use what is stored for a micro-batch's prompt."""
        with super().forward(stage, self.prompts[number]):
            yield

    def release(self, stage: int, number: int) -> None:
        """Does nothing: later runs need all values."""


class _Decoding:
    """Adds tokens to prompts, one in each run of the pipeline.

    Attributes:
        new: The new tokens of each prompt so far.
    """

    def __init__(
        self,
        pipeline: PipelineParallel,
        job: Job,
        sampling: Sampling,
        prompts: list[list[int]],
        cache: _Cache | None,
        inputs: Callable[[Tensor], Nest],
    ) -> None:
        """Begins without new tokens. Collective over the job.

        Args:
            pipeline: The pipeline that runs the model.
            job: The job of the pipeline.
            sampling: Chooses the tokens.
            prompts: The tokens of each prompt.
            cache: Stores keys and values from one run to the next; None for none.
            inputs: Makes the model's inputs from tokens, as for :func:`generate`.
        """
        self.new: list[list[int]] = [[] for _ in prompts]
        self._pipeline, self._sampling, self._prompts = pipeline, sampling, prompts
        self._prompt_keys, self._cache, self._inputs = prompt_keys(prompts), cache, inputs
        #: The ranks along mp, which may have shards of the logits.
        self._shards, replicas = job.model_parallel(), pipeline.replicas
        exchanges = any(kind.exchanges for kind in kinds_in(pipeline.layers.state.own_parameters()))
        with job.calling("begins to generate"):
            # The experts of a replica wait for tokens of the others, so that each runs all prompts.
            runs_all = any(job.everyone().all_gather(exchanges))
        first, step = (0, 1) if runs_all else (replicas.rank, replicas.ranks)
        #: The prompts that this replica runs, by number.
        self._prompts_of_replica = range(first, len(prompts), step)

    def advance(self, unfinished: list[int]) -> None:
        """Adds a token to each unfinished prompt, in one run. Collective over the job.

        Args:
            unfinished: The numbers of the prompts.
        """
        own_prompts = [number for number in unfinished if number in self._prompts_of_replica]
        chosen: list[tuple[int, int]] = []
        if own_prompts:
            inputs = []
            for number in own_prompts:
                new, is_cached = self.new[number], self._cache is not None
                # With a cache the layers have all positions before the last token.
                sequence = new[-1:] if new and is_cached else self._prompts[number] + new
                inputs.append(self._inputs(paddle.to_tensor([sequence], dtype="int64")))
            if self._cache is not None:
                self._cache.prompts = own_prompts
            units = self._cache or WHOLE
            with self._pipeline.run_forwards(inputs, _last_logits, units) as batch:
                chosen = self._choose_tokens(own_prompts, batch.ordered_outputs())
        by_replica = self._pipeline.from_last_stage(chosen)
        # Replicas that run all prompts have chosen the same tokens.
        for number, token in dict(pair for pairs in by_replica for pair in pairs).items():
            self.new[number].append(token)

    def _choose_tokens(self, numbers: list[int], logits: Sequence[Tensor]) -> list[tuple[int, int]]:
        """Chooses the next token of the prompts with these numbers. Collective along mp.

        ``logits`` has each prompt's logits at the last position: [vocabulary], or a shard along mp.
        Without the last stage, ``logits`` and the result are empty.

        Returns:
            For each prompt its number and the token.
        """
        if not logits:
            return []
        stacked = paddle.stack(list(logits)).astype("float32")
        by_rank = [tensor.numpy() for tensor in self._shards.all_gather(stacked)]
        # Each rank along mp has its columns of the logits, or all have the same full logits.
        losses = self._pipeline.layers.loss_layers()
        layers = [layer for loss in losses for layer in loss.sublayers(include_self=True)]
        takes_shards = any(type(layer).__name__ == "ParallelCrossEntropy" for layer in layers)
        differ = any((of_rank != by_rank[0]).any() for of_rank in by_rank)
        rows = np.concatenate(by_rank, axis=-1) if takes_shards or differ else by_rank[0]
        sequences = (self._prompts[number] + self.new[number] for number in numbers)
        return [
            (number, self._sampling.choose(row, *self._prompt_keys[number], len(sequence)))
            for number, row, sequence in zip(numbers, rows, sequences)
        ]


def _last_logits(output: Nest) -> Tensor:
    """Returns the logits [vocabulary] at the last position of a model's output."""
    logits = output[0] if isinstance(output, (tuple, list)) and output else output
    is_tensor = isinstance(logits, paddle.Tensor)
    if not (is_tensor and logits.is_floating_point() and logits.ndim == 3 and logits.shape[0] == 1):
        raise ConfigError(
            "generate needs the logits of each position from the last layer",
            expected="floats [1, length, vocabulary]",
            got=f"{logits.dtype} {list(logits.shape)}" if is_tensor else type(logits).__name__,
            fix="return logits from the last layer, and compute the loss in loss_fn",
        )
    return logits[0, -1]


def prompts_of(tokens: Any) -> list[list[int]]:
    """Returns the prompts given to :func:`generate` as lists of tokens.

    Raises:
        ConfigError: There is none, or one is empty or not made of tokens.
    """
    fix = "generate(model, [[5, 8, 13], [2]], ..): a list of tokens for each prompt"
    tokens = tokens.numpy() if isinstance(tokens, paddle.Tensor) else tokens
    rows = list(tokens) if hasattr(tokens, "__iter__") and not isinstance(tokens, str) else []
    prompts = [_prompt_array(row) for row in rows]
    for number, prompt in enumerate(prompts):
        if prompt.ndim != 1 or not prompt.size or prompt.dtype.kind not in "iu" or prompt.min() < 0:
            raise ConfigError(
                f"prompt {number} is no list of tokens",
                expected="one or more whole numbers of at least 0",
                got=repr(rows[number]),
                fix=fix,
            )
    if not prompts:
        raise ConfigError("there is no prompt to continue", got=f"tokens={tokens!r}", fix=fix)
    return [[int(token) for token in prompt] for prompt in prompts]


def _prompt_array(row: Any) -> np.ndarray[Any, Any]:
    """Returns a prompt as an array; an empty one if it is a list of lists of several lengths."""
    try:
        return np.asarray(row.numpy() if isinstance(row, paddle.Tensor) else row)
    except ValueError:
        return np.empty(0)


def _end_tokens(eos: Any) -> frozenset[int]:
    """Returns the tokens that end a continuation, from the argument ``eos`` of :func:`generate`.

    Raises:
        ConfigError: ``eos`` is no token, no collection of tokens, and not None.
    """
    tokens = eos
    if eos is None:
        tokens = []
    elif is_whole_number(eos, 0):
        tokens = [eos]
    if not isinstance(tokens, Collection) or not all(is_whole_number(t, 0) for t in tokens):
        raise ConfigError(
            "eos is a token, or several",
            got=f"eos={eos!r}",
            fix="give the number of the token, as tokenizer.token_to_id(..) returns it, or None",
        )
    return frozenset(map(int, tokens))


def _require_pipeline(model: Any) -> tuple[PipelineParallel, AbstractContextManager[None]]:
    """Returns the wrapped pipeline of a model, and the context manager within which it computes.

    Raises:
        ConfigError: The pipeline splits sequences or logits in a way that generating cannot use.
        UsageError: The model is not wrapped, or Paddle is in static mode.
    """
    computing: AbstractContextManager[None] = nullcontext()
    if isinstance(model, Model):
        model, computing = model.pipeline, model.computing()
    if not isinstance(model, PipelineParallel) or not paddle.in_dynamic_mode():
        raise UsageError(
            "generate runs a pipeline in dynamic graph",
            got=type(model).__name__ + ", in static mode" * (not paddle.in_dynamic_mode()),
            fix="generate(fleet.distributed_model(model), ..), or with a fleetpipe.Model; "
            "paddle.disable_static() goes back to dynamic graph",
        )
    if model.sequence.ranks > 1 or model.layers.placement.has_head:
        raise ConfigError(
            "generate needs whole sequences and whole logits",
            got=f"sep_degree x cp_degree = {model.sequence.ranks}"
            + ", and a VocabularyHead" * model.layers.placement.has_head,
            fix="load the checkpoint in a job without these, and generate there",
        )
    return model, computing


def _new_cache(pipeline: PipelineParallel, wanted: bool | None) -> _Cache | None:
    """Returns a new cache for keys and values; None if each token runs the whole sequence.

    ``wanted`` is the argument ``cache`` of :func:`generate`: None takes a cache if all layers can.

    Raises:
        ConfigError: ``wanted`` is True, and some layer cannot use a cache.
    """
    try:
        require_sliceable(pipeline.layers.layers)
    except ConfigError as error:
        if not wanted:
            return None
        raise ConfigError(
            "cache=True needs a list of layers that all take sequence chunks",
            got=str(error).splitlines()[0],
            fix="have it keep keys and values by fleetpipe.dygraph.slices, with takes_slices = "
            "True; or leave cache out",
        ) from None
    return None if wanted is False else _Cache()


@contextmanager
def _state_restored(pipeline: PipelineParallel) -> Iterator[None]:
    """Restores the random states and the layers' modes when the context ends."""
    training = pipeline.layers.with_modes.training
    with random_states_kept():
        try:
            yield
        finally:
            if training:
                pipeline.layers.begin(training=True)


class LogSamples(rank_policy.Callback):
    """Prints on the first rank how the model continues prompts: before training, then regularly.

    It does not change the bits of the training.
    """

    def __init__(
        self,
        tokens: Any,
        max_new_tokens: int,
        every: int | None = None,
        decode: Callable[[list[int]], str] = str,
        **options: Any,
    ) -> None:
        """Sets which prompts are continued, and when.

        Args:
            tokens: The prompts, as for :func:`fleetpipe.generate`.
            max_new_tokens: The most new tokens of a prompt.
            every: Batches from one print to the next; None: prints after each epoch.
            decode: Turns a prompt with its new tokens into text, such as a tokenizer's ``decode``.
            options: The other arguments of ``generate``.

        Raises:
            ConfigError: ``every`` is no whole number of at least 1, or there are no prompts.
        """
        super().__init__()
        self._every = None if every is None else require_whole("every", every)
        self._prompts, self._decode = prompts_of(tokens), decode
        self._options = {"max_new_tokens": max_new_tokens, **options}

    def on_train_begin(self, logs: Any = None) -> None:
        """Prints the first samples, which refuses invalid arguments before the training."""
        self._print()

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        """Prints samples after every so many batches."""
        if self._every is not None and self.model.global_step % self._every == 0:
            self._print()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Prints samples after an epoch if ``every`` is None."""
        if self._every is None:
            self._print()

    def _print(self) -> None:
        """Continues the prompts, and prints them on the first rank. Collective."""
        new = generate(self.model, self._prompts, **self._options)
        if self.model.is_rank("first"):
            for prompt, tokens in zip(self._prompts, new):
                text = self._decode(prompt + tokens)
                rank_policy.say(f"sample after step {self.model.global_step}: {text}")
