"""Masks that take too long are given up; what they cost is counted by session."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from outrider.grammar.constraint import allowed_mask, is_slow, masks_along_drafts
from outrider.grammar.grammar_cache import GrammarCache
from outrider.grammar.limits import MaskLimits
from outrider.grammar.mask_jobs import MaskJob, MaskMeter, MaskWorkers
from tests.unit.grammar import attacks
from tests.waiting import wait_until

LIMITS = MaskLimits(mask_ms=50.0, session_s=0.1)


class BusyMatcher:
    """A matcher whose masks compute until `go_on` is set."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def unsafe_compute_mask_ptr(self, address: int, size: int) -> None:
        while not self.go_on.is_set():
            pass

    def is_error(self) -> bool:
        return False


def busy_job(meter: MaskMeter) -> tuple[BusyMatcher, MaskJob]:
    matcher = BusyMatcher()
    return matcher, MaskJob(matcher, meter, 2)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def grammars(tiny_target: Path) -> Iterator[GrammarCache]:
    found = GrammarCache.from_tokenizer_file(
        tiny_target / "tokenizer.json", vocab_size=384, masks=LIMITS
    )
    assert found is not None
    yield found
    found.close()


def test_a_late_mask_is_given_up_and_its_worker_replaced() -> None:
    meter, workers = MaskMeter(LIMITS, may_be_ambiguous=True), MaskWorkers(1)
    late, late_job = busy_job(meter)
    began = time.monotonic()
    workers.start(late_job)
    workers.wait(late_job)
    assert late_job.is_late and not late_job.done.is_set()
    assert time.monotonic() - began < 40 * LIMITS.mask_ms * 1e-3 + 1.0
    assert "more than 50 ms" in meter.record(late_job)
    next_, next_job = busy_job(meter)
    next_.go_on.set()
    workers.start(next_job)
    workers.wait(next_job)
    assert next_job.done.is_set() and not next_job.is_late
    late.go_on.set()
    wait_until(late_job.done.is_set, timeout_s=10.0, what="the late job's end")


def test_slow_masks_are_counted_together() -> None:
    meter = MaskMeter(LIMITS, may_be_ambiguous=False)
    assert not meter.is_alone
    meter.record_joint(0.06)
    assert meter.is_alone, "whose masks they were is found out by asking each alone"
    _, job = busy_job(meter)
    job.longest_s = job.slow_s = 0.04
    assert meter.record(job) == "" and meter.is_slow and meter.is_alone
    assert meter.record(job) == ""
    assert "more than 0.1 s together" in meter.record(job)
    job.longest_s, job.slow_s = 0.001, 0.0
    meter.record(job)
    assert not meter.is_slow and not meter.is_alone


def test_an_ambiguous_grammar_fails_and_one_beside_it_does_not(grammars: GrammarCache) -> None:
    bad = grammars.compile_grammar(attacks.ambiguous()).start_constraint([2])
    good = grammars.compile_grammar(attacks.lark('start: ("b" /[a-z]/)*')).start_constraint([2])
    letter = next(i for i in range(3, 384) if (allowed_mask(bad)[i >> 5] >> (i & 31)) & 1)
    output: list[int] = []
    while not bad.failure and len(output) < 600:
        masks = masks_along_drafts([(bad, ()), (good, ())])
        assert not good.failure and np.array_equal(masks[1].masks[0], allowed_mask(good))
        output.append(letter)
        bad.advance_to(np.array(output, dtype=np.int32))
    assert "took more than" in bad.failure
    # It ends, and nothing touches the matcher, which may still be in use.
    assert bad.matcher is None and allowed_mask(bad)[0] == 1 << 2
    bad.push_tokens([letter])
    bad.pop_tokens(0)


def test_a_slow_mask_is_computed_in_the_background(grammars: GrammarCache) -> None:
    plain = grammars.compile_grammar(attacks.lark('start: "a" /[a-z]/*')).start_constraint([2])
    expected = grammars.compile_grammar(attacks.lark('start: "a" /[a-z]/*')).start_constraint([2])
    letter = next(i for i in range(384) if (allowed_mask(expected)[i >> 5] >> (i & 31)) & 1)
    output = np.array([letter], dtype=np.int32)
    expected.advance_to(output)
    assert not is_slow(plain)
    plain.meter.is_slow = True
    assert is_slow(plain)
    plain.prepare(output)
    wait_until(lambda: plain.prepare(output), timeout_s=10.0, what="the mask")
    assert plain.current_mask is not None and np.array_equal(
        plain.current_mask, allowed_mask(expected)
    )
    plain.advance_to(output)
    assert np.array_equal(allowed_mask(plain), allowed_mask(expected))


def test_limits_that_make_no_sense_are_refused() -> None:
    for wrong in ({"mask_ms": 0.0}, {"session_s": float("inf")}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            MaskLimits(**wrong)
