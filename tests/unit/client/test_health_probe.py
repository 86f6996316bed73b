"""When a process has been silent for too long, or has not served for too long."""

from __future__ import annotations

from outrider.client.local.health_probe import MAX_NOT_SERVING_S, HealthRecord, ProbeResult


def test_silence_counts_from_the_last_answer() -> None:
    record = HealthRecord(10.0, now=100.0)
    for now in range(101, 105):
        record.record_probe(ProbeResult.SERVING, float(now))
    for now in range(105, 115):
        record.record_probe(ProbeResult.SILENT if now % 2 else None, float(now))
        assert not record.restart_reason(float(now))
    record.record_probe(None, 115.0)
    assert record.restart_reason(115.0) == "has not answered for 10 s"


def test_an_answer_ends_the_silence() -> None:
    record = HealthRecord(3.0, now=0.0)
    for now, health in (
        (1.0, ProbeResult.SILENT),
        (2.9, ProbeResult.SERVING),
        (4.0, None),
        (5.8, None),
    ):
        record.record_probe(health, now)
        assert not record.restart_reason(now)


def test_time_in_which_the_supervisor_was_stopped_counts_against_nobody() -> None:
    record = HealthRecord(10.0, now=0.0)
    record.record_probe(ProbeResult.SERVING, 0.5)
    record.record_probe(ProbeResult.SILENT, 60.0)
    assert not record.restart_reason(60.0)
    for tenth in range(600, 696):
        record.record_probe(None, tenth / 10)
        assert not record.restart_reason(tenth / 10)
    record.record_probe(None, 71.0)
    assert record.restart_reason(71.0)


def test_whoever_answers_that_it_does_not_serve_has_time_to_drain() -> None:
    record = HealthRecord(10.0, now=0.0)
    for now in range(int(MAX_NOT_SERVING_S) + 1):
        record.record_probe(ProbeResult.NOT_SERVING, float(now))
        assert not record.restart_reason(float(now))
    record.record_probe(ProbeResult.NOT_SERVING, MAX_NOT_SERVING_S + 1.0)
    assert record.restart_reason(MAX_NOT_SERVING_S + 1.0) == "has not served for 60 s"
