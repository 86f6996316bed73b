"""Bytes written by earlier releases decode for ever, and encoding does not drift.

golden_v1.txt holds `name hex` lines. A line is only ever added: if a change of the contract makes
an old line fail, the change is incompatible (proto/README.md).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.wire.message_types import plain
from tests.wire.samples import SAMPLES, decoder, encoder

GOLDEN = dict(
    line.split() for line in (Path(__file__).parent / "golden_v1.txt").read_text().splitlines()
)


def test_every_sample_has_golden_bytes() -> None:
    assert set(SAMPLES) == set(GOLDEN)


@pytest.mark.parametrize("name", SAMPLES)
def test_old_bytes_decode_to_the_same_message(name: str) -> None:
    assert plain(decoder(name)(bytes.fromhex(GOLDEN[name]))) == plain(SAMPLES[name][1])


@pytest.mark.parametrize("name", SAMPLES)
def test_encoding_is_stable(name: str) -> None:
    assert encoder(name)(SAMPLES[name][1]).hex() == GOLDEN[name]


@pytest.mark.parametrize("name", SAMPLES)
def test_unknown_fields_of_a_newer_peer_are_ignored(name: str) -> None:
    field_900_varint_1 = b"\xa0\x38\x01"
    newer = bytes.fromhex(GOLDEN[name]) + field_900_varint_1
    assert plain(decoder(name)(newer)) == plain(SAMPLES[name][1])
