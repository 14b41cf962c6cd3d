"""What `auto` means on this machine; asked once, when a project is opened, and recorded there."""

import platform
from pathlib import Path
from typing import Literal

import torch

Device = Literal["cuda", "mps", "cpu"]
DType = Literal["float32", "bfloat16"]


def best_device() -> Device:
    """cuda where there is one, else mps, else cpu."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def best_dtype(device: Device) -> DType:
    """bfloat16 where the hardware multiplies it; elsewhere it is several times slower than float32."""
    if device == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float32"
    return "bfloat16" if device == "cpu" and _cpu_multiplies_bfloat16() else "float32"


def torch_dtype(name: DType) -> torch.dtype:
    """The torch type of this name."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def _cpu_multiplies_bfloat16() -> bool:
    if platform.machine().lower() in ("x86_64", "amd64"):
        info = Path("/proc/cpuinfo")
        flags = info.read_text().split() if info.exists() else []
        return "avx512_bf16" in flags or "amx_bf16" in flags
    return False
