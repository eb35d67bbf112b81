"""The one table of tolerances. No other test file holds a number of this kind.

Compared are outputs in the given dtype with the fp64 oracle on the same rounded inputs, so that a tolerance
measures arithmetic alone; accumulation is fp32 everywhere. Integers are compared exactly, without a table.
"""

import torch

OUTPUT: dict[torch.dtype, dict[str, float]] = {
    torch.float32: {"atol": 2e-6, "rtol": 1e-5},
    torch.float16: {"atol": 1e-3, "rtol": 1e-3},
    torch.bfloat16: {"atol": 8e-3, "rtol": 8e-3},
}
"""By dtype of the output."""

CAP_ROUNDING = 2e-7
"""tanh in fp32 is right to so much of its value: a score near its cap is off by the cap times it."""


def output(dtype: torch.dtype, softcap: float | None = None) -> dict[str, float]:
    """Return what an output may be off by."""
    # Scores here reach about 50: a larger cap is never approached.
    extra = 0.0 if softcap is None else min(softcap, 50.0) * CAP_ROUNDING
    return {name: value + extra for name, value in OUTPUT[dtype].items()}


LSE = {"atol": 1e-5, "rtol": 1e-6}
"""Natural log-sum-exp, fp32."""

GOLDEN = {"atol": 2e-5, "rtol": 0.0}
"""Against numbers that the original's kernels gave in fp32."""

FP8_STATISTIC = 0.03
"""Mean absolute error of an fp8 cache against unrounded inputs, as a share of the reference's standard deviation."""

TOUR = 1e-5
"""The tour's largest error: fp32 outputs of real values, whose norms reach 10."""

TURNED = {"atol": 8e-3, "rtol": 2e-3}
"""Recorded fp16 rows, turned by RoPE and rounded again, against those recorded there: one rounding of 2^-11 each."""
