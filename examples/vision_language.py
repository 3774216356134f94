"""Captions for scikit-learn's digits: a tower for images before a decoder, in balanced stages.

    python examples/vision_language.py --report report.json
    python -m fleetpipe run --nproc 2 examples/vision_language.py --schedule ZBH1

A text is "<image> seven is the digit .", made of a digit's label, or "seven comes after six ."
without an image. The images have several sizes; of three micro-batches one has text alone.
"""

from __future__ import annotations

import argparse
import os
import sys
import zlib  # noqa: F401  # first: paddlepaddle 2.6.2 brings one that Python cannot use
from typing import Any

import numpy as np
import paddle
import support
from images import digits
from paddle.nn import functional as F
from qwen_vl import IMAGE, PAD, QwenVL, Sizes, collate

import fleetpipe
from fleetpipe import fleet, parity

NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
WORDS = ["<pad>", "<image>", ".", "the", "digit", "is", "comes", "after", *NUMBERS]
#: By how much the images of 8 x 8 are enlarged, high and wide.
SCALES = ((1, 1), (2, 1), (1, 2), (2, 2))
LENGTH = 24


def options() -> argparse.Namespace:
    parser = support.options("A model of vision and language.", steps=150)
    parser.add_argument("--pp", type=int, help="stages; default: the processes, or 2 in one")
    parser.add_argument("--dp", type=int, default=1, help="replicas")
    parser.add_argument("--micro-batches", type=int, default=6, help="of a batch")
    parser.add_argument("--rows", type=int, default=8, help="texts of a micro-batch")
    parser.add_argument("--layers", type=int, default=4, help="of the tower, and of the decoder")
    parser.add_argument("--width", type=int, default=64, help="of the decoder; the tower's is half")
    parser.add_argument("--rate", type=float, default=0.003, help="learning rate of AdamW")
    args = parser.parse_args()
    world = int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))
    args.pp = args.pp or (max(world // args.dp, 1) if world > 1 else 2)
    return args


def tokens(text: str) -> list[Any]:
    return [WORDS.index(word) for word in text.split()]


class Captions:
    """Makes the micro-batches: the same numbers, the same texts."""

    def __init__(self, sizes: Sizes, rows: int) -> None:
        self._sizes, self._rows = sizes, rows
        images, labels, self.name = digits(1, 1)
        self._images, self._labels = images[:, 0], labels[:, 0]

    def __call__(self, number: int, held_out: bool = False) -> tuple[dict[str, Any], Any]:
        """Returns the inputs and the labels of a micro-batch; a sixth of the digits is held out."""
        draw = np.random.default_rng([number, held_out])
        last = len(self._images) * 5 // 6
        some = draw.integers(last, len(self._images)) if held_out else draw.integers(0, last)
        high, wide = SCALES[number % len(SCALES)]
        texts = []
        for row in (some + np.arange(self._rows)) % len(self._images):
            label = int(self._labels[row])
            if number % 3 == 1 and not held_out:
                following = NUMBERS[(label + 1) % 10]
                texts.append(tokens(f"{following} comes after {NUMBERS[label]} ."))
            else:
                image = self._images[row].repeat(high, 0).repeat(wide, 1)
                texts.append([image, *tokens(f"{NUMBERS[label]} is the digit .")])
        inputs = collate(texts, self._sizes, LENGTH)
        labels = np.roll(inputs["tokens"].numpy(), -1, 1)
        labels[:, -1] = PAD
        return inputs, paddle.to_tensor(np.where(labels == IMAGE, PAD, labels))


def loss_fn(logits: Any, labels: Any) -> Any:
    """Returns the cross entropy of the next words."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD)


def right_digits(model: Any, captions: Captions, count: int) -> float:
    """Returns the share of held-out digits whose word is the likeliest. Collective."""
    held_out = [captions(number, held_out=True) for number in range(count)]
    guesses = model.predict_batch([inputs for inputs, _ in held_out]).argmax(-1).numpy()
    labels = np.concatenate([labels.numpy() for _, labels in held_out])
    names = labels >= WORDS.index("zero")
    return float((guesses == labels)[names].mean())


def main() -> int:
    args = options()
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"pp_degree": args.pp, "dp_degree": args.dp}
    strategy.pipeline_configs = {
        "accumulate_steps": args.micro_batches,
        "micro_batch_size": args.rows,
        "schedule_mode": args.schedule,
    }
    fleet.init(is_collective=True, strategy=strategy)
    paddle.seed(0)
    sizes = Sizes(
        *(len(WORDS), args.width, args.layers),
        vision_width=args.width // 2,
        vision_layers=args.layers,
        full=(args.layers - 1,),
    )
    captions = Captions(sizes, args.rows)
    # The example has images; micro-batches without leave out what is made of them.
    pipe = fleetpipe.pipeline(QwenVL(sizes), captions(0)[0], loss_fn, shape_inputs=("grids",))
    model = fleet.distributed_model(pipe)
    adam = paddle.optimizer.AdamW(args.rate, parameters=pipe.parameters())
    optimizer = fleet.distributed_optimizer(adam)
    session = parity.begin(model, optimizer) if args.report else None
    hcg = fleet.get_hybrid_communicate_group()
    replica, count = hcg.get_data_parallel_rank(), args.micro_batches
    first = hcg.get_global_rank() == 0
    if first:
        print(f"data: {captions.name}, with captions of their labels; {pipe.choice}", flush=True)
    for step in range(args.steps):
        begin = (step * args.dp + replica) * count
        micro_batches = [captions(number) for number in range(begin, begin + count)]
        batch = [list(part) for part in zip(*micro_batches)]
        if session is None:
            loss = model.train_batch(batch, optimizer)
        else:
            loss = session.step(batch)[1]
        if first and (step + 1) % 10 == 0:
            print(f"step {step + 1}: loss {float(loss):.4f}", flush=True)
    share = right_digits(model, captions, count)
    if first:
        print(f"held out: {share:.0%} of the digits are named", flush=True)
    if session is not None:
        if first:
            print(session.report.verdict(), flush=True)
        if model.is_pipeline_last_stage() and replica == 0:
            found = {"ranks": args.pp, "dp": args.dp, "mp": 1, "schedule": model.schedule.name}
            found |= {"paddle": paddle.__version__, "data": captions.name, "accuracy": share}
            support.write_report(args.report, session.report, **found)
    fleet.shutdown()
    return 0 if session is None or session.report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
