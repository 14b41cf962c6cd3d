"""What `auto` means on this machine; asked once, when a project is opened, and recorded there."""

import platform
import time
from pathlib import Path
from typing import Literal

import torch

Device = Literal["cuda", "mps", "cpu"]
DType = Literal["float32", "bfloat16"]
DTYPES: tuple[DType, ...] = ("float32", "bfloat16")


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


def multiply_rate(device: Device, dtype: DType, seconds: float = 0.3, size: int = 1024) -> float:
    """Measured floating-point operations a second of one square matrix product, 2 n^3 each."""
    factor = torch.randn(size, size).to(device, torch_dtype(dtype))

    def run(times: int) -> float:
        begun = time.perf_counter()
        for _ in range(times):
            product = factor @ factor
        product.flatten()[0].item()  # waits for an accelerator, which works ahead of its caller
        return time.perf_counter() - begun

    run(1)
    times = max(1, int(seconds / run(1)))
    return 2.0 * size**3 * times / run(times)


def device_name(device: Device) -> str:
    """What people call it."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    models = [line.partition(":")[2].strip() for line in _lines(info) if line.startswith("model name")]
    return models[0] if device == "cpu" and models else platform.machine()


def device_memory(device: Device) -> int | None:
    """Bytes of an accelerator's own memory; None where it shares the machine's."""
    return torch.cuda.get_device_properties(0).total_memory if device == "cuda" else None


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _cpu_multiplies_bfloat16() -> bool:
    if platform.machine().lower() in ("x86_64", "amd64"):
        info = Path("/proc/cpuinfo")
        flags = info.read_text().split() if info.exists() else []
        return "avx512_bf16" in flags or "amx_bf16" in flags
    return False
