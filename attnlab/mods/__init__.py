"""What happens to scores between the dot product and the mask: soft cap, temperature, and modifiers by name.

`jit` and `tl` are what the Triton half of a modifier is written with: Triton's own, set up as this process runs its
kernels, or stand-ins where Triton is missing.
"""

from attnlab._triton import jit as jit
from attnlab._triton import tl as tl
from attnlab.registry import import_all

import_all(__path__, __name__)
