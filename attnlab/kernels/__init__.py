"""Triton text and its launchers: launcher and kernel in one file, launcher first.

`core.py` and `sweep.py` hold the steps that kernels share, `pairs.py` how pools of 8-bit floats are read, `launch.py`
what launchers share. `decode_latent_hopper.py` alone is written in Gluon, in which each group of warps has a text of
its own. Tiles, warps and stages are data (`tuning/`). `launcher.py` launches what is compiled without Triton's detour,
`repeat.py` the next layer's call; arguments come in groups (`attnlab/arguments.py`).
"""
