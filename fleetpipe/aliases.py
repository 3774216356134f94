"""Names of Paddle's types for signatures; each is ``Any``, as Paddle's stubs are weak.

They tell a reader the type of a value where the signature would otherwise have ``Any``. The import
needs no Paddle.
"""

from __future__ import annotations

from typing import Any

#: A ``paddle.Tensor``, or a parameter.
Tensor = Any
#: A node of autograd's graph.
GradNode = Any
#: What the forward of a ``PyLayer`` leaves for its backward.
Context = Any
#: A ``paddle.nn.Layer``.
Layer = Any
#: A ``paddle.ParamAttr``, or what Paddle makes one of.
Attribute = Any
#: A ``paddle.optimizer.Optimizer``, or what stands for one.
Optimizer = Any
#: A gradient clip, as Paddle's optimizers take it.
Clip = Any
#: A ``paddle.optimizer.lr.LRScheduler``.
Scheduler = Any
#: A ``paddle.amp.GradScaler``.
Scaler = Any
#: A Fleet ``DistributedStrategy``.
Strategy = Any
#: A ``HybridCommunicateGroup``, its ``CommunicateTopology``, or one process's stand-in.
Topology = Any
#: One of Paddle's communication groups.
PaddleGroup = Any
#: One of Paddle's key-value stores, or what stands for one.
PaddleStore = Any
#: A static program, of either representation.
Program = Any
#: A variable or value of a static program.
Variable = Any
#: An operation of a static program, of either representation, and the block that it is in.
Op = Any
Block = Any
#: What a variable of a scope holds: a dense tensor, below those of ``paddle.Tensor``.
ScopeTensor = Any
#: Where a static program's variables have their values.
Scope = Any
#: A device.
Place = Any
#: A dtype, as Paddle has it.
DType = Any
#: Nested tuples, lists and dicts of tensors and plain values.
Nest = Any
