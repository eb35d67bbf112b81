"""CUDA graphs: a step is captured once, at its largest, and replayed for every smaller one.

Its plan is made by the same code as any other; what is fixed is the memory that it lies in. On a CPU, which has no
CUDA graphs, `rerun=True` runs the step again over the same fixed memory.

When it pays: an eager call costs the host the same however much the device has to do, layer after layer; a replay costs
it one launch for the whole step. Where the device is done with a layer before the host has launched the next one, which
is so for small batches over short contexts, it waits for the host unless the step is replayed. Where it has more to do,
as for long contexts, the host is ahead, and a graph saves nothing but the host's own time.
`attnlab bench --host` measures the host's side, `attnlab bench` the device's.

A decode loop appends a token to every request, plans the step, fills the inputs in place, and replays:

>>> import torch, attnlab
>>> from attnlab import graphs
>>> wb = attnlab.workbench("SmolLM2-135M", lens=[20, 7], policy="seed", engine="eager", layers=[18], room=3)
>>> def step(plan, q, k, v):
...     return wb.backend.decode(18, q, k, v, plan)
>>> inputs = dict(zip("qkv", wb.newest(18)))
>>> graph = graphs.capture(wb.backend, step, graphs.DecodeShape(requests=2), inputs=inputs, rerun=True)
>>> lens = list(wb.lens)
>>> for _ in range(3):
...     for row in (0, 1):
...         slots = wb.cache.append(row, 1)
...         lens[row] += 1
...     plan = graph.plan(attnlab.DecodeBatch.of(rows=[0, 1], lens=lens, device="cpu"))
...     for name, x in graph.inputs.items():  # a server's layers write q, k and v there
...         x[: graph.live] = torch.randn(2, *x.shape[1:])
...     out = graph.replay(plan)  # good until the next replay
>>> lens, out.shape
([23, 10], torch.Size([2, 9, 64]))
"""

from attnlab.graphs.graph import Graph as Graph
from attnlab.graphs.graph import Step as Step
from attnlab.graphs.graph import capture as capture
from attnlab.graphs.shapes import DecodeShape as DecodeShape
from attnlab.graphs.shapes import DraftShape as DraftShape
from attnlab.graphs.shapes import ExtendShape as ExtendShape
from attnlab.graphs.shapes import Shape as Shape
from attnlab.graphs.shapes import VerifyShape as VerifyShape

__all__ = ["DecodeShape", "DraftShape", "ExtendShape", "Graph", "Shape", "Step", "VerifyShape", "capture"]
