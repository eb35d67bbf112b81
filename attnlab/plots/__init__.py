"""Pictures: one file for each kind, one look for all. A new file here registers itself with `show`."""

import sys
from contextlib import suppress
from importlib import import_module

from attnlab import _boot
from attnlab.registry import import_all

if "matplotlib" not in sys.modules:
    # Where MPLBACKEND names no backend, matplotlib cannot be imported; no picture needs one.
    with _boot.without("MPLBACKEND") as backend:
        matplotlib = import_module("matplotlib")
    with suppress(ValueError):
        matplotlib.rcParams.update({} if backend is None else {"backend": backend})

import_all(__path__, __name__)
