"""Checks that word the error: the argument's name, what was expected, what came, and the way out."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import is_dataclass

import torch
from torch import Tensor

FP32 = torch.finfo(torch.float32)


def require(condition: bool, message: str, error: type[Exception] = ValueError) -> None:
    """Raise `error(message)` unless `condition` holds."""
    if not condition:
        raise error(message)


def positive(name: str, value: int) -> int:
    """Return `value`, an int of at least 1 that kernels can hold in 32 bits, or raise."""
    if type(value) is int and 1 <= value < 2**31:  # words only where they are needed
        return value
    require(
        isinstance(value, int) and not isinstance(value, bool), f"{name}: expected an int, got {value!r}", TypeError
    )
    require(value >= 1, f"{name}: expected at least 1, got {value}")
    require(value < 2**31, f"{name}: expected less than 2^31, got {value:,}")
    return value


def whole(name: str, value: object) -> int:
    """Return `value` as a plain int (numpy's are welcome), or raise; a bool is no number."""
    wrong = TypeError(f"{name}: expected an int, got {value!r}")
    if isinstance(value, bool):
        raise wrong
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise wrong from None


def member(name: str, value: object, count: int, *, of: str) -> int:
    """Return `value` as a plain int if it is the number of one of the `count` things that `of` has, or raise.

    >>> member("head", 9, 9, of="the layer")
    Traceback (most recent call last):
    ValueError: head: the layer has heads 0 to 8, got 9
    """
    known = f"{name}s 0 to {count - 1}" if count else f"no {name}"
    got = whole(name, value)
    require(0 <= got < count, f"{name}: {of} has {known}, got {got}")
    return got


def number(name: str, value: float, *, positive: bool) -> float:
    """Return `value`, a Python number that fp32 can hold, or raise: kernels take their scalars so."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name}: expected a Python number, got {describe(value)}; pass float({name})")
    low, high = FP32.tiny, FP32.max
    size_fits = abs(value) <= high and (value >= low if positive else True)
    wanted = f"a positive number from {low:.2g} to {high:.2g}" if positive else f"a number of at most {high:.2g}"
    require(size_fits, f"{name}: expected {wanted} (fp32), got {value}")
    return value


def describe(x: object) -> str:
    """Words for what came: shape, dtype and device of a tensor, the type of anything else. Reads no tensor back."""
    if is_dataclass(x):
        return type(x).__name__  # its tensors would be printed, for which a GPU is waited for
    if not isinstance(x, Tensor):
        return f"{type(x).__name__} {x!r}"[:80]
    return f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')} on {x.device}"


def tensor(
    name: str,
    x: object,
    *,
    shape: Sequence[int | str],
    dtype: torch.dtype | Sequence[torch.dtype] | None = None,
    device: torch.device | None = None,
    hint: str = "",
) -> Tensor:
    """Return `x` if it is a tensor of that shape, dtype and device; raise with all three side by side otherwise.

    An int in `shape` must match, a word names an axis of any size. `hint` says where the expectation comes from.
    """
    # Calls that are right are many: look first, word the error only where there is one.
    if (
        isinstance(x, Tensor)
        and (dtype is None or x.dtype == dtype or not isinstance(dtype, torch.dtype) and x.dtype in dtype)
        and (device is None or same_device(x.device, device))
        and _sizes_match(x.shape, shape)
    ):
        return x
    dtypes = (dtype,) if isinstance(dtype, torch.dtype) else dtype
    is_tensor = isinstance(x, Tensor)
    wanted = f"[{', '.join(str(s) for s in shape)}]"
    if dtypes is not None:
        wanted += " " + " or ".join(str(d).removeprefix("torch.") for d in dtypes)
    wanted += f" on {device}" if device is not None else ""
    message = f"{name}: expected {wanted}, got {describe(x)}" + (f"; {hint}" if hint else "")
    wrong_type = not is_tensor or (dtypes is not None and isinstance(x, Tensor) and x.dtype not in dtypes)
    raise (TypeError if wrong_type else ValueError)(message)


def _sizes_match(got: torch.Size, wanted: Sequence[int | str]) -> bool:
    if len(got) != len(wanted):
        return False
    for size, expected in zip(got, wanted):  # noqa: B905, SIM110  (all() over a generator takes twice the time)
        if size != expected and not isinstance(expected, str):
            return False
    return True


def same_device(a: torch.device, b: torch.device) -> bool:
    """Whether two devices are one; `cuda` without an index means the current one."""
    if a == b:
        return True
    if a.type != "cuda" or b.type != "cuda":
        return a.type == b.type
    current = torch.cuda.current_device()
    return (current if a.index is None else a.index) == (current if b.index is None else b.index)


def placed(device: torch.device | str) -> torch.device:
    """Return the device with its number, so that `cuda` means one GPU for good; raise where there is none."""
    device = torch.device(device)
    if device.type != "cuda":
        return device
    require(torch.cuda.is_available(), f"device: torch sees no GPU here, got {device}; use device='cpu'")
    count = torch.cuda.device_count()
    require((device.index or 0) < count, f"device: there are GPUs 0 to {count - 1}, got {device}")
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


def contiguous(name: str, x: Tensor) -> Tensor:
    """Return `x` if its elements lie in order without gaps, as kernels read it, or raise."""
    if not x.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {x.stride()}; pass {name}.contiguous()")
    return x


def storages(*tensors: Tensor | None) -> list[int]:
    """Return where the memory begins that each is a view of, of those that there are."""
    return [x.untyped_storage().data_ptr() for x in tensors if x is not None]


def own_memory(name: str, x: Tensor, others: dict[str, Tensor | None]) -> None:
    """Raise unless `x`, which is written, repeats no element and shares its memory with none of the others."""
    extent = 1
    for step, size in sorted(zip(x.stride(), x.shape, strict=True)):
        overlaps = size > 1 and step < extent
        require(
            not overlaps,
            f"{name}: is expanded or overlaps itself (strides {x.stride()}), so that several results would be one "
            f"element; pass {name}.contiguous()",
        )
        extent += step * (size - 1)
    memory = x.untyped_storage().data_ptr()
    for other, y in others.items():
        if y is not None and x.numel() and y.numel() and y.untyped_storage().data_ptr() == memory:
            raise ValueError(
                f"{name}: shares its memory with {other}, which the call reads or writes too; allocate it apart"
            )


def last_axis_contiguous(name: str, x: Tensor) -> Tensor:
    """Return `x` if its last axis has stride 1 (kernels add lane numbers with stride 1), or raise."""
    if x.shape[-1] > 1 and x.stride(-1) != 1 and x.numel():
        raise ValueError(
            f"{name}: the last axis must be contiguous, got strides {x.stride()}; pass {name}.contiguous()"
        )
    return x


def one_of(name: str, value: object, known: Sequence[str]) -> str:
    """Return `value` if it is one of the known names, or raise with the list of them."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name}: expected one of {', '.join(known)}, got {value!r}")
    return value
