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
#: The context by which the forward of a ``PyLayer`` passes values to its backward.
Context = Any
#: A ``paddle.nn.Layer``.
Layer = Any
#: A ``paddle.ParamAttr``, or a value that Paddle converts to one.
Attribute = Any
#: A ``paddle.optimizer.Optimizer``, or a wrapper of one.
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
#: One of Paddle's key-value stores, or an object with its methods.
PaddleStore = Any
#: A static program, of either representation.
Program = Any
#: A variable or value of a static program.
Variable = Any
#: An operation of a static program, of either representation, and the block that it is in.
Op = Any
Block = Any
#: The dense tensor of a variable in a scope, which is no ``paddle.Tensor``.
ScopeTensor = Any
#: A scope, which has the values of a static program's variables.
Scope = Any
#: A device.
Place = Any
#: A dtype, as Paddle has it.
DType = Any
#: Nested tuples, lists and dicts of tensors and plain values.
Nest = Any
