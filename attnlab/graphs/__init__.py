"""CUDA graphs: a step is captured once, at its largest, and replayed for every smaller one.

Its plan is made by the same code as any other; what is fixed is the memory that it lies in. On a CPU, which has no
CUDA graphs, `rerun=True` runs the step again over the same fixed memory.
"""

from attnlab.graphs.graph import Graph as Graph
from attnlab.graphs.graph import capture as capture
from attnlab.graphs.shapes import DecodeShape as DecodeShape
from attnlab.graphs.shapes import DraftShape as DraftShape
from attnlab.graphs.shapes import ExtendShape as ExtendShape
from attnlab.graphs.shapes import Shape as Shape
from attnlab.graphs.shapes import VerifyShape as VerifyShape
