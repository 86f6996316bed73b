"""The choice of products follows what was measured, and never costs correctness or memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from outrider.engine import products
from outrider.engine.linear import PackedLinear, PlainLinear, can_pack, make_linear, min_rows
from outrider.engine.products import Single, choose, measure

CPU = torch.device("cpu")
needs_packing = pytest.mark.skipif(
    not can_pack(torch.float32, CPU), reason="this torch build cannot pack weights"
)
EPYC = {"padded": 0.5, "packed": 0.9, "plain": 1.0}
XEON = {"padded": 1.5, "packed": 1.2, "plain": 1.0}


@pytest.mark.parametrize(
    ("seconds", "keep_plain", "expected"),
    [
        (EPYC, True, Single.PADDED),
        (XEON, True, Single.PLAIN),
        (XEON, False, Single.PACKED),
        (dict.fromkeys(EPYC, 1.0), True, Single.PADDED),
        ({**EPYC, "plain": 0.49}, True, Single.PADDED),
    ],
)
def test_the_habit_stands_unless_something_else_is_clearly_faster(
    seconds: dict[str, float], keep_plain: bool, expected: Single
) -> None:
    assert choose(seconds, keep_plain=keep_plain) is expected


def test_a_measurement_tells_a_slow_product_from_a_quick_one() -> None:
    def slow(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: [F.linear(x, weight) for _ in range(8)][-1]

    times = measure((512, 512), torch.float32, {"slow": slow, "quick": PlainLinear})
    assert 0.0 < times["quick"] < times["slow"]


def test_one_thread_measures_and_the_number_of_threads_stays() -> None:
    before, seen = torch.get_num_threads(), set[int]()

    def watched(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        def product(x: torch.Tensor) -> torch.Tensor:
            seen.add(torch.get_num_threads())
            return F.linear(x, weight)

        return product

    try:
        torch.set_num_threads(2)
        measure((64, 64), torch.float32, {"watched": watched})
        assert seen == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@needs_packing
@pytest.mark.parametrize("choice", list(Single))
@pytest.mark.parametrize("has_bias", [True, False])
def test_every_choice_computes_the_same_layer(
    monkeypatch: pytest.MonkeyPatch, choice: Single, has_bias: bool
) -> None:
    monkeypatch.setattr("outrider.engine.linear.measured", lambda *_, **__: choice)
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
    padded, packed = PackedLinear(weight), PackedLinear(weight, single=Single.PACKED)
    assert min_rows([padded, padded]) == padded.min_rows > 1
    assert min_rows([padded, packed]) == min_rows([PlainLinear(weight)]) == min_rows([]) == 1


@needs_packing
def test_a_large_weight_is_measured_once_and_the_choice_can_be_read() -> None:
    weight = torch.ones(640, 512)
    first = make_linear(weight)
    before = products.choices()["640x512 float32"]
    assert type(make_linear(weight)) is type(first)
    assert products.choices()["640x512 float32"] == before
    assert not any(name.startswith("8x8 ") for name in products.choices())


@needs_packing
def test_bfloat16_keeps_products_that_do_not_depend_on_the_number_of_rows() -> None:
    make_linear(torch.ones(1024, 1024, dtype=torch.bfloat16))
    assert not any("bfloat16" in name for name in products.choices())


def test_memory_bounds_the_plain_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_available_bytes", lambda: 1000)
    assert products.room_for_copies(250)
    assert not products.room_for_copies(251)
    monkeypatch.setattr(products, "_available_bytes", lambda: None)
    assert not products.room_for_copies(1)


def test_threads_are_those_asked_for_or_some_up_to_all() -> None:
    before = torch.get_num_threads()
    try:
        products.set_threads(1, "cpu")
        assert torch.get_num_threads() == 1
        products.set_threads(0, "cpu")
        assert torch.get_num_threads() == 1
        assert products.fastest_threads(2) in (1, 2)
        assert torch.get_num_threads() == 1, "measuring leaves the setting as it was"
    finally:
        torch.set_num_threads(before)
