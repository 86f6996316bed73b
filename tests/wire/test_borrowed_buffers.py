"""What is read where it lies is copied before it is checked, but for features."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from outrider.wire.codec import decode_verifier_messages, encode_verifier_message
from outrider.wire.messages import Verdicts
from tests.wire.samples import SAMPLES


def same(one: Any, other: Any) -> bool:
    return np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other


@pytest.mark.parametrize(
    "name", [name for name, (kind, _) in SAMPLES.items() if kind == "verifier"]
)
def test_a_peer_that_changes_a_frame_later_changes_nothing_that_was_checked(name: str) -> None:
    data = encode_verifier_message(SAMPLES[name][1])
    frame = bytearray(data)
    (before,) = decode_verifier_messages(data)
    (found,) = decode_verifier_messages(memoryview(frame).toreadonly())
    frame[:] = b"\xff" * len(frame)
    if not isinstance(before, Verdicts):
        assert found == before
        return
    assert isinstance(found, Verdicts)
    for field in Verdicts.__dataclass_fields__:
        if field != "features":
            assert same(getattr(found, field), getattr(before, field)), field
    assert before.features is not None and found.features is not None
    assert not np.array_equal(found.features.joined(), before.features.joined())
