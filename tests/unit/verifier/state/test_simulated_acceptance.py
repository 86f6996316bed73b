"""Rates of simulated acceptance, and how much KV a device has room for: plain arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outrider_verifier.kv.capacity import GRAPH_LAYER_BYTES, max_kv_tokens, reserved_bytes
from outrider_verifier.state.simulated_acceptance import parse_length, parse_rates, rate_of_mean

from outrider.errors import FailedPreconditionError

GIB = 1 << 30


@given(st.integers(1, 31), st.floats(0.0, 1.0))
def test_the_rate_gives_the_mean_back(num_drafts: int, part: float) -> None:
    mean = 1.0 + part * num_drafts
    rate = rate_of_mean(mean, num_drafts)
    assert 0.0 <= rate <= 1.0
    assert sum(rate**i for i in range(num_drafts + 1)) == pytest.approx(mean, abs=1e-9)


def test_a_mean_becomes_one_rate_for_every_position() -> None:
    rates = parse_rates("2.6", 3)
    assert len(set(rates)) == 1 and len(rates) == 3
    assert 1 + rates[0] + rates[0] ** 2 + rates[0] ** 3 == pytest.approx(2.6)
    assert parse_rates("4", 3) == (1.0, 1.0, 1.0)
    assert parse_rates("1.0", 1) == pytest.approx((0.0,))
    assert parse_rates("1.7", 1) == pytest.approx((0.7,))


def test_rates_are_taken_as_they_are_and_nothing_is_off() -> None:
    assert parse_rates("0.8, 0.6,0", 3) == (0.8, 0.6, 0.0)
    assert parse_rates("", 3) == ()


def test_a_scheduled_length_is_no_rate() -> None:
    assert parse_length("length:2.6", 3) == 2.6 and parse_rates("length:2.6", 3) == ()
    assert parse_length("length:4", 3) == 4.0
    assert [parse_length(text, 3) for text in ("", "2.6", "0.8,0.6,0")] == [0.0] * 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("length:", "must be a mean"),
        ("length:x", "a scheduled length"),
        ("length:nan", "not in"),
        ("length:0.9", "not in"),
        ("length:4.1", "what 3 draft tokens allow"),
        ("length:1e400", "not in"),
    ],
)
def test_a_length_that_cannot_be_is_refused_with_what_is_allowed(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_length(text, 3)


def fit(**changes: int | float) -> int:
    facts: dict[str, int | float] = {
        "free_bytes": 60 * GIB,
        "total_bytes": 80 * GIB,
        "fraction": 0.9,
        "reserved": 2 * GIB,
        "bytes_per_token": 1 << 17,
        "max_tokens": 10**9,
    }
    return max_kv_tokens(**(facts | changes))  # type: ignore[arg-type]


def test_kv_takes_what_the_fraction_leaves_beside_weights_and_workspace() -> None:
    # 72 GiB may be used, 20 are, 2 are reserved: 50 GiB of 128 KiB tokens.
    assert fit() == 50 * GIB >> 17
    assert fit(max_tokens=1000) == 1000
    # What another process uses of the device counts too.
    assert fit(free_bytes=30 * GIB) == 20 * GIB >> 17


def test_a_device_without_room_is_refused_with_the_figures() -> None:
    with pytest.raises(FailedPreconditionError, match="20480 MiB are in use") as caught:
        fit(fraction=0.25)
    assert caught.value.reason == "NO_DEVICE_MEMORY"


def test_large_rounds_heads_and_graphs_need_room() -> None:
    small = reserved_bytes(
        decode_tokens=64, vocab_size=1000, head_bytes=0, warp_bytes=0, graph_layers=0
    )
    large = reserved_bytes(
        decode_tokens=1024, vocab_size=128256, head_bytes=GIB, warp_bytes=GIB, graph_layers=12800
    )
    graphs = 12800 * GRAPH_LAYER_BYTES
    assert large - small == 2 * GIB + 12 * (1024 * 128256 - 64 * 1000) + graphs
    # As measured: 321 shapes of a target of 32 layers took 1.8 GiB.
    assert 1.8 * GIB < 321 * 32 * GRAPH_LAYER_BYTES < 2.2 * GIB
