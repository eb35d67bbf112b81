"""Compile every kernel for GPUs that are not there: `ATTNLAB_INTERPRET=0 python -m attnlab.inspect.resources`.

Each variant (`variants.py`) that models of data/models.json launch (`shapes.py`) is compiled as its launcher would
compile it, pointers and strides marked as divisible by 16. Registers, spills and shared memory come out of the binary
(`compiling.py`). The table (`table.py`) lies in data/kernel_resources.md.
"""

from attnlab.inspect.resources.compiling import compile_variant as compile_variant
from attnlab.inspect.resources.compiling import ptx as ptx
from attnlab.inspect.resources.compiling import serialized as serialized
from attnlab.inspect.resources.compiling import ttgir as ttgir
from attnlab.inspect.resources.shapes import FOR_HOPPER as FOR_HOPPER
from attnlab.inspect.resources.shapes import GQA as GQA
from attnlab.inspect.resources.shapes import MLA as MLA
from attnlab.inspect.resources.shapes import NARROW as NARROW
from attnlab.inspect.resources.shapes import TARGETS as TARGETS
from attnlab.inspect.resources.table import TABLE as TABLE
from attnlab.inspect.resources.variants import variants as variants
