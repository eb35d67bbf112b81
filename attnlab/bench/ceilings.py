"""What the device can do at most, measured in the run whose times are held to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from attnlab.bench.result import Ceilings
from attnlab.bench.timing import Timer, timed


def ceilings(device: torch.device | str, timer: Timer) -> Ceilings:
    """Measure a copy (bytes read and written), a read (the better of two sums) and a product of two bf16 matrices.

    On a CPU the sizes are small, and the product is of fp32.
    """
    on_gpu = torch.device(device).type == "cuda"
    count = (1 << 29) if on_gpu else (1 << 22)
    a, b = torch.ones(count, device=device), torch.empty(count, device=device)
    whole = a.view(torch.int32)
    reads: list[Callable[[], Any]] = [lambda: torch.sum(a), lambda: torch.amax(whole)]
    calls: list[Callable[[], Any]] = [lambda: b.copy_(a), *reads]
    for call in calls:
        call()
    copy, *read = (timing.median_us for timing in timed([timer.hold(call) for call in calls], rounds=timer.rounds))
    size, dtype = (8192, torch.bfloat16) if on_gpu else (512, torch.float32)
    x, y = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    torch.mm(x, y)
    (product,) = timed([timer.hold(lambda: torch.mm(x, y))], rounds=timer.rounds)
    nbytes = a.numel() * a.itemsize
    return Ceilings(
        copy_tb_s=2 * nbytes / copy / 1e6,
        read_tb_s=nbytes / min(read) / 1e6,
        matmul_tflop_s=2 * size**3 / product.median_us / 1e6,
    )
