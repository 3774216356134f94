"""The trees of one_hash.py by hand, in plain Paddle on one device: it prints the same hash.

    MKL_DEBUG_CPU_TYPE=5 python examples/one_hash_by_hand.py 100

where processors are AMD's, as fleetpipe sets it there; elsewhere without it, and with MKL_CBWR=AVX2
for both on Intel's with AVX-512. 100 is the steps.
"""
# ruff: noqa: ANN001, ANN201, ANN204

import hashlib
import re
import sys
from pydoc_data.topics import topics

import paddle
from paddle import nn

STEPS, M, ROWS, T, D, H, LAYERS, V, B = int([5, *sys.argv[1:]][-1]), 8, 2, 32, 64, 8, 4, 256, 8
NORMAL, MASK = nn.initializer.Normal(0.0, 0.02), paddle.triu(paddle.full([T, T], -1e9), 1)


def tree(parts):  # in halves while that goes, then one after another
    n = len(parts) // 2
    return sum(parts[1:], parts[0]) if len(parts) % 2 else tree(parts[:n]) + tree(parts[n:])


def fan(x, n=B):  # backward adds the gradients of n uses in pairs
    return [x] if n == 1 else [*fan(x.clone(), n // 2), *fan(x.clone(), n // 2)]


def column(x, weight, rows=False):
    parts = zip(fan(x), weight.split(B, 0 if rows else 1))
    return paddle.concat([paddle.matmul(x, part, transpose_y=rows) for x, part in parts], -1)


def row(x, layer):
    return tree([x @ w for x, w in zip(x.split(B, -1), layer.weight.split(B))]) + layer.bias


class Block(nn.Layer):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.qkv = nn.LayerNorm(D), nn.Linear(D, 3 * D, NORMAL, False)
        self.projection, self.perceptron_norm = nn.Linear(D, D, NORMAL), nn.LayerNorm(D)
        self.widen, self.narrow = nn.Linear(D, 4 * D, NORMAL), nn.Linear(4 * D, D, NORMAL)

    def forward(self, x):
        qkv = column(self.attention_norm(x), self.qkv.weight).reshape([ROWS, T, H, -1])
        q, k, v = qkv.transpose([0, 2, 1, 3]).split(3, -1)
        scores = paddle.matmul(q, k, transpose_y=True) / (D // H) ** 0.5 + MASK
        seen = (nn.functional.softmax(scores) @ v).transpose([0, 2, 1, 3])
        x = x + row(seen.reshape([ROWS, T, D]), self.projection)
        wide = column(self.perceptron_norm(x), self.widen.weight) + self.widen.bias
        return x + row(nn.functional.gelu(wide), self.narrow)


def entropy(x, y):  # its gradient
    most, own = x.max(-1, keepdim=True), [(p, p.max(-1, keepdim=True)) for p in x.split(B, -1)]
    powers = [((part - top).exp(), (top - most).exp()) for part, top in own]
    total = tree([e.sum(-1, keepdim=True) * scale for e, scale in powers])
    shares = paddle.concat([e * (scale / total) for e, scale in powers], -1)
    return (shares - nn.functional.one_hot(y, V)) / (M * ROWS * T)


def square(name, g):  # of a weight that mp cuts: of its blocks
    cut = re.search("(qkv|widen)|embedding|projection.w|narrow.w", name)
    return tree([p.square().sum() for p in (g.split(B, -1 if cut[1] else 0) if cut else [g])])


layers = []
for make in (V, T, *[Block] * LAYERS, lambda: nn.LayerNorm(D)):
    paddle.seed(1234 + len(layers))
    layers.append(make() if callable(make) else nn.Embedding(make, D, weight_attr=NORMAL))
model = nn.Sequential(*layers)
names = {"0.weight": "shared_layers.embedding.table.weight", "1.weight": "1.table.weight"}
w = {names.get(name, name): parameter for name, parameter in model.named_parameters()}
adamw = paddle.optimizer.AdamW(1e-3, parameters=[*w.values()], weight_decay=0.01)
text = "\n".join(topics.values()).encode()[: STEPS * M * ROWS * (T + 1)]
for batch in paddle.to_tensor([*text]).reshape([STEPS, M, ROWS, T + 1]):
    parts = []
    for micro_batch in batch:
        head = model[0].weight.detach()  # a use of its own
        head.stop_gradient = False
        x = model[2:](model[0](micro_batch[:, :-1]) + model[1].weight)
        logits = column(x, head, rows=True)
        of_logits = entropy(logits.detach(), micro_batch[:, 1:])
        parts.append(paddle.grad([logits], [*w.values(), head], [of_logits]))
    *gradients, of_head = map(tree, zip(*parts))
    gradients[0] += of_head
    norm = paddle.stack([*map(square, w, gradients)]).sum().sqrt()
    for parameter, gradient in zip(w.values(), gradients):
        parameter.grad = gradient * (1.0 / norm.clip(min=1.0))
    adamw.step()
lines = []
for name, p in sorted(w.items()):
    content = f"float32 {list(p.shape)}\n".encode() + p.numpy().tobytes()
    lines.append(f"{hashlib.sha256(content).hexdigest()}  {name}\n")
print("hash:", hashlib.sha256("".join(lines).encode()).hexdigest())
