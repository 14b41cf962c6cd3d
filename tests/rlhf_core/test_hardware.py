"""What `auto` means on this machine."""

import platform

import pytest
import torch

from rlhf_core.hardware import best_device, best_dtype, torch_dtype


def test_the_best_device_is_one_that_can_compute() -> None:
    device = best_device()
    assert torch.ones(2, device=device).sum().item() == 2
    assert (device == "cuda") == torch.cuda.is_available()


def test_names_of_types_are_torch_types() -> None:
    assert (torch_dtype("float32"), torch_dtype("bfloat16")) == (torch.float32, torch.bfloat16)


def test_mps_computes_in_float32() -> None:
    assert best_dtype("mps") == "float32"


@pytest.mark.skipif(
    platform.system() != "Linux" or platform.machine() != "x86_64", reason="asks the kernel of an x86 Linux"
)
def test_a_cpu_computes_in_bfloat16_exactly_where_torch_finds_the_instructions() -> None:
    multiplies = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    assert best_dtype("cpu") == ("bfloat16" if multiplies else "float32")
