"""A small vision tower, projector and decoder in the shapes of Qwen2.5-VL, in plain Paddle.

It knows of no pipeline. Images of several sizes come as one list of patches with the grid of each,
and their features take the places of the ``IMAGE`` tokens in the text.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F

#: The token in whose places the features of images come, and that which pads a text.
IMAGE, PAD = 1, 0


class Sizes(NamedTuple):
    """The sizes of a model.

    Attributes:
        vocabulary: Number of tokens.
        width: Of the decoder.
        layers: Of the decoder.
        heads: Of the decoder; half as many of keys and values.
        vision_width: Of the tower.
        vision_layers: Of the tower.
        vision_heads: Of the tower.
        full: The tower's layers that attend to whole images; the others attend within windows.
        patch: Height and width of a patch, of one channel.
        merge: Height and width of the patches that become one token.
        window: Height and width of a window, in tokens.
    """

    vocabulary: int = 64
    width: int = 32
    layers: int = 4
    heads: int = 4
    vision_width: int = 16
    vision_layers: int = 4
    vision_heads: int = 2
    full: tuple[int, ...] = (3,)
    patch: int = 2
    merge: int = 2
    window: int = 2


class RMSNorm(nn.Layer):
    """Divides by the root of the mean square."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = self.create_parameter(
            [width], default_initializer=nn.initializer.Constant(1.0)
        )

    def forward(self, x: Any) -> Any:
        return x * paddle.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


def rotated(x: Any, cosine: Any, sine: Any) -> Any:
    """Rotates the halves of the last axis."""
    first, second = x.chunk(2, -1)
    return x * cosine + paddle.concat([-second, first], -1) * sine


class SwiGLU(nn.Layer):
    """The feed-forward of both towers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Any) -> Any:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class VisionAttention(nn.Layer):
    """Attends within pieces of the list of patches, which begin at cumulative lengths."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x: Any, cumulative: Any, cosine: Any, sine: Any) -> Any:
        patches, width = x.shape
        query, key, value = (
            self.qkv(x).reshape([patches, 3, self.heads, -1]).transpose([1, 2, 0, 3]).unbind(0)
        )
        query, key = rotated(query, cosine, sine), rotated(key, cosine, sine)
        lengths = (cumulative[1:] - cumulative[:-1]).tolist()
        pieces = [part.split(lengths, 1) for part in (query, key, value)]
        attended = [
            F.softmax(q @ k.transpose([0, 2, 1]) / q.shape[-1] ** 0.5) @ v
            for q, k, v in zip(*pieces)
        ]
        return self.out(paddle.concat(attended, 1).transpose([1, 0, 2]).reshape([patches, width]))


class VisionBlock(nn.Layer):
    """A layer of the tower."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before, self.after = RMSNorm(width), RMSNorm(width)
        self.attention, self.feed = VisionAttention(width, heads), SwiGLU(width)

    def forward(self, x: Any, cumulative: Any, cosine: Any, sine: Any) -> Any:
        x = x + self.attention(self.before(x), cumulative, cosine, sine)
        return x + self.feed(self.after(x))


class VisionTower(nn.Layer):
    """Patches [patches, patch**2] and grids [images, (height, width)] to features of tokens."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes, width = sizes, sizes.vision_width
        self.embed = nn.Linear(sizes.patch**2, width)
        self.blocks = nn.LayerList(
            [VisionBlock(width, sizes.vision_heads) for _ in range(sizes.vision_layers)]
        )
        self.norm = RMSNorm(width)
        self.merger = nn.Sequential(
            nn.Linear(width * sizes.merge**2, width * sizes.merge**2),
            nn.GELU(),
            nn.Linear(width * sizes.merge**2, sizes.width),
        )
        steps = paddle.arange(0, width // sizes.vision_heads // 2, 2, dtype="float32")
        frequencies = 1.0 / 10000.0 ** (steps / (width // sizes.vision_heads // 2))
        self.register_buffer("frequencies", frequencies, persistable=False)

    def windows(self, grids: list[list[int]]) -> tuple[Any, Any]:
        """Returns the tokens ordered by windows, and the cumulative lengths of these in patches."""
        merge, size = self.sizes.merge, self.sizes.window
        order: list[np.ndarray] = []
        lengths, first = [0], 0
        for height, width in grids:
            high, wide = height // merge, width // merge
            tokens = np.arange(high * wide).reshape(high, wide) + first
            first += high * wide
            for top in range(0, high, size):
                for left in range(0, wide, size):
                    window = tokens[top : top + size, left : left + size].ravel()
                    order.append(window)
                    lengths.append(lengths[-1] + len(window) * merge**2)
        return paddle.to_tensor(np.concatenate(order)), paddle.to_tensor(lengths)

    def places(self, grids: list[list[int]]) -> Any:
        """Returns the row and the column of each patch, those of a token together."""
        merge = self.sizes.merge
        found = []
        for height, width in grids:
            both = paddle.stack(paddle.meshgrid(paddle.arange(height), paddle.arange(width)), -1)
            both = both.reshape([height // merge, merge, width // merge, merge, 2])
            found.append(both.transpose([0, 2, 1, 3, 4]).reshape([-1, 2]))
        return paddle.concat(found)

    def forward(self, patches: Any, grids: Any) -> Any:
        x, unit = self.embed(patches), self.sizes.merge**2
        each = grids.tolist()
        order, of_windows = self.windows(each)
        angles = self.places(each).astype("float32").unsqueeze(-1) * self.frequencies
        angles = angles.flatten(1).reshape([x.shape[0] // unit, unit, -1])[order].flatten(0, 1)
        angles = paddle.concat([angles, angles], -1)
        cosine, sine = angles.cos(), angles.sin()
        x = x.reshape([x.shape[0] // unit, unit, -1])[order].flatten(0, 1)
        of_images = F.pad(grids.prod(-1).cumsum(0), [1, 0])
        for number, block in enumerate(self.blocks):
            x = block(x, of_images if number in self.sizes.full else of_windows, cosine, sine)
        x = self.merger(self.norm(x).reshape([x.shape[0] // unit, -1]))
        return x[paddle.argsort(order)]


class Attention(nn.Layer):
    """Causal attention with grouped keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, heads // 2, width // heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, self.groups * self.size)
        self.value = nn.Linear(width, self.groups * self.size)
        self.out = nn.Linear(width, width, bias_attr=False)

    def forward(self, x: Any, mask: Any, cosine: Any, sine: Any) -> Any:
        rows, length, width = x.shape
        query, key, value = (
            part.reshape([rows, length, -1, self.size]).transpose([0, 2, 1, 3])
            for part in (self.query(x), self.key(x), self.value(x))
        )
        query, key = rotated(query, cosine, sine), rotated(key, cosine, sine)
        key, value = (part.repeat_interleave(2, 1) for part in (key, value))
        weights = F.softmax(query @ key.transpose([0, 1, 3, 2]) / self.size**0.5 + mask)
        return self.out((weights @ value).transpose([0, 2, 1, 3]).reshape([rows, length, width]))


class DecoderLayer(nn.Layer):
    """A layer of the decoder."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before, self.after = RMSNorm(width), RMSNorm(width)
        self.attention, self.feed = Attention(width, heads), SwiGLU(width)

    def forward(self, x: Any, mask: Any, cosine: Any, sine: Any) -> Any:
        x = x + self.attention(self.before(x), mask, cosine, sine)
        return x + self.feed(self.after(x))


class QwenVL(nn.Layer):
    """The logits of the next tokens.

    ``forward`` takes tokens [rows, length], their places [3, rows, length] by time, height and
    width, and, unless the batch has text alone, all its patches and the grid of each image.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        small = paddle.ParamAttr(initializer=nn.initializer.Normal(0.0, 0.05))
        self.embed = nn.Embedding(sizes.vocabulary, sizes.width, weight_attr=small)
        self.visual = VisionTower(sizes)
        self.layers = nn.LayerList(
            [DecoderLayer(sizes.width, sizes.heads) for _ in range(sizes.layers)]
        )
        self.norm = RMSNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias_attr=False)
        half = sizes.width // sizes.heads // 2
        #: How many frequencies turn by time, by height and by width.
        self.sections = [half - 2 * (half // 3), half // 3, half // 3]
        frequencies = 1.0 / 10000.0 ** (paddle.arange(half, dtype="float32") / half)
        self.register_buffer("frequencies", frequencies, persistable=False)

    def turns(self, places: Any) -> tuple[Any, Any]:
        """Returns cosine and sine [rows, 1, length, size of a head]."""
        angles = places.astype("float32").unsqueeze(-1) * self.frequencies
        parts = [part[axis] for axis, part in enumerate(angles.split(self.sections, -1))]
        angles = paddle.concat(parts + parts, -1).unsqueeze(1)
        return angles.cos(), angles.sin()

    def forward(self, tokens: Any, places: Any, patches: Any = None, grids: Any = None) -> Any:
        x = self.embed(tokens)
        if patches is not None:
            here = (tokens == IMAGE).unsqueeze(-1).expand_as(x)
            x = put(x, here, self.visual(patches, grids))
        length = tokens.shape[1]
        ahead = paddle.triu(paddle.full([length, length], -1e4), 1)
        mask = ahead + (tokens == PAD).astype("float32").unsqueeze([1, 2]) * -1e4
        cosine, sine = self.turns(places)
        for layer in self.layers:
            x = layer(x, mask, cosine, sine)
        return self.head(self.norm(x))


def put(x: Any, here: Any, features: Any) -> Any:
    """Puts features, one after another, into the places that a mask has."""
    if hasattr(paddle, "masked_scatter"):
        return paddle.masked_scatter(x, here, features)
    # Paddle 2.6 has none.
    order = here[:, :, 0].flatten().astype("int64").cumsum(0) - 1
    return paddle.where(here, features[order.clip(0, features.shape[0] - 1)].reshape(x.shape), x)


def collate(texts: list[list[Any]], sizes: Sizes, length: int) -> dict[str, Any]:
    """Returns the inputs of texts of tokens, in which images [height, width] stand for themselves.

    A token of an image has the time at which the image comes, and its row and column from there; a
    text goes on behind the largest. A text is filled up with ``PAD`` to ``length`` tokens.
    """
    merge, patch = sizes.merge, sizes.patch
    rows, places, patches, grids = [], [], [], []
    for text in texts:
        tokens: list[int] = []
        columns: list[tuple[int, int, int]] = []
        for item in text:
            start = max(map(max, columns), default=-1) + 1
            if not isinstance(item, np.ndarray):
                tokens.append(item)
                columns.append((start, start, start))
                continue
            high, wide = (side // (patch * merge) for side in item.shape)
            tokens += [IMAGE] * (high * wide)
            columns += [(start, start + y, start + x) for y in range(high) for x in range(wide)]
            # The patches of a token come together.
            parts = item.reshape(high, merge, patch, wide, merge, patch)
            patches.append(parts.transpose(0, 3, 1, 4, 2, 5).reshape(-1, patch**2))
            grids.append([high * merge, wide * merge])
        rest = length - len(tokens)
        rows.append(tokens + [PAD] * rest)
        places.append(np.array(columns + [(0, 0, 0)] * rest).T)
    return {
        "tokens": paddle.to_tensor(rows),
        "places": paddle.to_tensor(np.stack(places, 1)),
        "patches": paddle.to_tensor(np.concatenate(patches)) if grids else None,
        "grids": paddle.to_tensor(grids) if grids else None,
    }
