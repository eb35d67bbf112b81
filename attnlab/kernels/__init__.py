"""Triton text and its launchers: launcher and kernel in one file, launcher first where it is a function.

`core.py` and `sweep.py` hold the steps that kernels share, `groups.py` those of kernels in Gluon, for Hopper, whose
groups of warps go ways of their own; `pairs.py` how pools of 8-bit floats are read, `launch.py` what launchers share.
Tiles, warps and stages are data (`tuning/`). `launcher.py` launches what is compiled without Triton's detour,
`repeat.py` the next layer's call; arguments come in groups (`attnlab/arguments.py`).
"""
