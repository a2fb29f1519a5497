"""The floating-point dtypes that a checkpoint can hold, and their names in a safetensors header."""

from __future__ import annotations

import torch

# Only floats train: an integer or complex parameter in the export list is a mistake of the caller.
NAME_OF_DTYPE: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
DTYPE_OF_NAME: dict[str, torch.dtype] = {name: dtype for dtype, name in NAME_OF_DTYPE.items()}

# Master and moments are stored as float32, whatever the optimizer holds.
STATE_DTYPE = torch.float32


def plain_name(dtype: torch.dtype) -> str:
    """Return `float32` for `torch.float32`, as messages and tables print it."""
    return str(dtype).removeprefix("torch.")


def supported_names() -> str:
    """Return the supported dtypes as a phrase for an error message."""
    return ", ".join(plain_name(dtype) for dtype in NAME_OF_DTYPE)
