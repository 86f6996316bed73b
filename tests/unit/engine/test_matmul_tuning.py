"""The choice of products follows shape and processor, and never costs correctness or memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from outrider.engine import matmul_tuning
from outrider.engine.linear import PackedLinear, PlainLinear, can_pack, make_linear, min_rows
from outrider.engine.matmul_tuning import (
    Processor,
    SingleRowMethod,
    choose_single,
    parse_cpuinfo,
    this_processor,
)

CPU = torch.device("cpu")
needs_packing = pytest.mark.skipif(
    not can_pack(torch.float32, CPU), reason="this torch build cannot pack weights"
)
XEON = Processor("GenuineIntel", has_avx512=True)
EPYC = Processor("AuthenticAMD", has_avx512=True)
LARGE = (640, 512)


@pytest.mark.parametrize(
    ("processor", "shape", "keep_plain", "expected"),
    [
        (XEON, LARGE, True, SingleRowMethod.PLAIN),
        (XEON, LARGE, False, SingleRowMethod.PACKED),
        (XEON, (64, 64), True, SingleRowMethod.PADDED),
        (EPYC, LARGE, True, SingleRowMethod.PADDED),
        (Processor("GenuineIntel", has_avx512=False), LARGE, True, SingleRowMethod.PADDED),
        (Processor("", has_avx512=False), LARGE, True, SingleRowMethod.PADDED),
    ],
)
def test_shape_and_processor_choose_the_product(
    processor: Processor, shape: tuple[int, int], keep_plain: bool, expected: SingleRowMethod
) -> None:
    assert choose_single(shape, torch.float32, processor, keep_plain=keep_plain) is expected


def test_bfloat16_keeps_products_that_do_not_depend_on_the_number_of_rows() -> None:
    choice = choose_single((1024, 1024), torch.bfloat16, XEON, keep_plain=True)
    assert choice is SingleRowMethod.PADDED


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("vendor_id\t: GenuineIntel\nflags\t\t: fpu avx512f amx_tile\n\n", XEON),
        ("vendor_id\t: AuthenticAMD\nflags\t\t: fpu avx512f\n\nflags\t: fpu\n", EPYC),
        ("Features\t: fp asimd\nCPU implementer\t: 0x41\n", Processor("", has_avx512=False)),
    ],
)
def test_the_processor_is_what_the_first_core_says(text: str, expected: Processor) -> None:
    assert parse_cpuinfo(text) == expected


@needs_packing
@pytest.mark.parametrize("slow", ["plain", "packed"])
def test_the_choice_does_not_depend_on_how_long_products_take(
    monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    def delayed(method: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(*args: Any) -> torch.Tensor:
            time.sleep(0.002)
            return method(*args)

        return run

    layer = PlainLinear if slow == "plain" else PackedLinear
    monkeypatch.setattr(layer, "__call__", delayed(layer.__call__))
    make_linear(torch.ones(656, 512))
    expected = choose_single((656, 512), torch.float32, this_processor(), keep_plain=True)
    assert matmul_tuning.measured_choices()["656x512 float32"] == str(expected)


@needs_packing
@pytest.mark.parametrize("choice", list(SingleRowMethod))
@pytest.mark.parametrize("has_bias", [True, False])
def test_every_choice_computes_the_same_layer(
    monkeypatch: pytest.MonkeyPatch, choice: SingleRowMethod, has_bias: bool
) -> None:
    monkeypatch.setattr("outrider.engine.linear.choose_single", lambda *_, **__: choice)
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn((48, 40), generator=generator)
    bias = torch.randn(48, generator=generator) if has_bias else None
    layer = make_linear(weight, bias)
    with torch.inference_mode():
        for rows in (0, 1, 2, 3, 4, 9):
            x = torch.randn((rows, 40), generator=generator)
            residual = torch.ones((rows, 48))
            torch.testing.assert_close(layer(x), F.linear(x, weight, bias))
            torch.testing.assert_close(layer.add(x, residual), F.linear(x, weight, bias) + 1.0)


@needs_packing
def test_a_batch_is_padded_only_if_every_layer_wants_it() -> None:
    weight = torch.ones(8, 8)
    padded, packed = PackedLinear(weight), PackedLinear(weight, single=SingleRowMethod.PACKED)
    assert min_rows([padded, padded]) == padded.min_rows > 1
    assert min_rows([padded, packed]) == min_rows([PlainLinear(weight)]) == min_rows([]) == 1


@needs_packing
def test_the_choice_can_be_read_by_shape() -> None:
    make_linear(torch.ones(LARGE))
    expected = choose_single(LARGE, torch.float32, this_processor(), keep_plain=True)
    assert matmul_tuning.measured_choices()["640x512 float32"] == str(expected)


def test_the_memory_of_the_machine_bounds_the_plain_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul_tuning, "total_memory_bytes", lambda: 1000)
    assert matmul_tuning.has_memory_for_copies(125)
    assert not matmul_tuning.has_memory_for_copies(126)
    monkeypatch.setattr(matmul_tuning, "total_memory_bytes", lambda: None)
    assert not matmul_tuning.has_memory_for_copies(1)


def test_threads_are_those_asked_for_or_some_up_to_all() -> None:
    before = torch.get_num_threads()
    try:
        matmul_tuning.set_compute_threads(1, "cpu")
        assert torch.get_num_threads() == 1
        matmul_tuning.set_compute_threads(0, "cpu")
        assert torch.get_num_threads() == 1
        assert matmul_tuning.fastest_threads(2) in (1, 2)
        assert torch.get_num_threads() == 1, "measuring leaves the setting as it was"
    finally:
        torch.set_num_threads(before)
