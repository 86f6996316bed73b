"""Tokens per second and round breakdown by placement, for the widened model.

Rounds are in lock-step: a round's draft begins when the verdict is known. In a round with a
separate drafter, `draft` is the drafting time that the drafter reports, `transfer` is the rest of
the wait for its proposal, `verify` is the target's forward on the device, and `other` is the
remaining time between two rounds. A separate drafter is measured twice: with CPU cores that go idle
between rounds, and with `--busy-polling-cores`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from outrider.process_tuning import run_event_loop as run_loop
from outrider_bench.gpu.plain import WARM_TOKENS, sized
from outrider_bench.gpu.simulated_rounds import save, wrap_engine
from outrider_bench.gpu.support.benchmark_context import SPARE_SESSIONS, Bench, show
from outrider_bench.gpu.support.load_driver import drive_sessions
from outrider_bench.gpu.support.services import (
    COLOCATED,
    PLAIN,
    SEPARATE,
    LoadedModels,
    RunningService,
    ServingSetup,
    serve_models,
)
from outrider_bench.gpu.support.timeline import (
    DRAFT,
    VERIFY,
    HostTimeline,
    device_spans,
    idle_gaps_us,
)
from outrider_bench.gpu.support.trace import TrackSpan

BATCHES = (1, 8)
DRAFT_LENGTH = 3
BUSY_POLLING_SUFFIX = "-awake"
"""Suffix of the name of a placement in the results if its processes keep CPU cores busy-polling."""
REQUESTS = 8
"""Number of requests at a batch size of one. With larger batches there is one request per
session."""


def run(bench: Bench) -> dict[str, object]:
    """Measure the placements at batch sizes 1 and 8 and return the result for the JSON file."""
    models = bench.widened()
    speeds: dict[str, dict[str, float]] = {str(batch): {} for batch in BATCHES}
    details: dict[str, Any] = {}
    overhead: dict[str, float] = {}
    rows = []
    for setup in _setups(bench):
        name = setup.placement + (BUSY_POLLING_SUFFIX if setup.busy_polling_cores else "")
        for batch, facts in run_loop(_measure(bench, models, setup)).items():
            speeds[str(batch)][name] = facts["tokens_per_s"]
            details.setdefault(name, {})[str(batch)] = facts
            split = facts["split_ms"]
            rows.append((name, batch, facts["tokens_per_s"], *split.values()))
            if setup.placement == SEPARATE and batch == 1 and facts["overhead_us"] is not None:
                overhead["grpc" if setup.busy_polling_cores else "grpc_idle_cores"] = facts[
                    "overhead_us"
                ]
    show(
        f"placement, {models.name}, K = {DRAFT_LENGTH}, lock-step",
        ("placement", "batch", "tokens/s", "draft ms", "transfer ms", "verify ms", "other ms"),
        rows,
    )
    figures: dict[str, object] = {"placement_tokens_per_s": speeds}
    if overhead:
        figures["round_overhead_us"] = overhead
    return bench.result(
        "placement",
        models,
        draft_length=DRAFT_LENGTH,
        output_tokens=bench.output_tokens,
        busy_polling_cores=bench.args.busy_polling_cores,
        placements=details,
        figures=figures,
    )


def _setups(bench: Bench) -> Iterator[ServingSetup]:
    for placement in bench.placements(PLAIN, COLOCATED, SEPARATE):
        setup = ServingSetup(
            placement=placement, draft_length=DRAFT_LENGTH, record=True, warm_buckets=True
        )
        setup = sized(bench, setup)
        if placement != SEPARATE or setup.busy_polling_cores:
            yield replace(setup, busy_polling_cores=0)
        if placement == SEPARATE:
            yield setup


async def _measure(
    bench: Bench, models: LoadedModels, setup: ServingSetup
) -> dict[int, dict[str, Any]]:
    largest = min(max(BATCHES), max(bench.batches))
    setup = replace(setup, max_sessions=largest + SPARE_SESSIONS)
    found = {}
    async with serve_models(models, setup) as running:
        for batch in (b for b in BATCHES if b <= largest):
            prompts = bench.prompts(REQUESTS if batch == 1 else batch)
            warm = prompts[:batch]
            await drive_sessions(
                running, warm, min(WARM_TOKENS, bench.output_tokens), tag=f"w{batch}"
            )
            found[batch] = await _one(bench, running, prompts, batch)
    return found


async def _one(
    bench: Bench, running: RunningService, prompts: list[list[int]], batch: int
) -> dict[str, Any]:
    running.reports.clear()
    if running.recorder is not None:
        running.recorder.take_spans()
    host = HostTimeline()
    if bench.args.out is not None and batch == BATCHES[0]:
        wrap_engine(running, host)
    wave = await drive_sessions(
        running,
        prompts,
        bench.output_tokens,
        stop_ids=bench.stop_ids,
        concurrency=batch,
        tag=f"b{batch}",
    )
    # The reports of the last rounds follow their events.
    await asyncio.sleep(0.01)
    spans = [] if running.recorder is None else device_spans(running.recorder.take_spans())
    if batch == BATCHES[0]:
        title = f"{running.models.name}, {running.setup.placement}, batch {batch}"
        save(bench.args.out, f"timeline-widened-{running.setup.placement}", spans, title)
    split, overhead = split_round(running.reports, spans, batch)
    return {
        **wave.summary(),
        "drafter_device": running.drafter_device,
        "split_ms": split,
        "overhead_us": overhead,
    }


def split_round(
    reports: Sequence[Any], spans: Sequence[TrackSpan], batch: int
) -> tuple[dict[str, float], float | None]:
    """Return the medians of a round's parts by name, in milliseconds, and the idle time of the
    device between two rounds, in microseconds.

    Only rounds in which all `batch` sessions decoded are used for the parts. The idle time is the
    median time between two forwards of the target, without the time for drafting; None if it is not
    known.
    """
    full = [r for r in reports if r.prefill_tokens == 0 and r.verify_rows == batch]
    if not full:
        return dict.fromkeys(("draft", "transfer", "verify", "other"), float("nan")), None
    drafted = median(r.drafted_s for r in full) * 1000.0
    waited = median(r.waited_s for r in full) * 1000.0
    period = median(r.total_s + r.waited_s for r in full) * 1000.0
    verify = _median_ms(spans, VERIFY, median(r.forward_s for r in full) * 1000.0)
    own = _median_ms(spans, DRAFT, 0.0)
    transfer = max(0.0, waited - drafted)
    other = max(0.0, period - verify - own - drafted - transfer)
    parts = {"draft": drafted + own, "transfer": transfer, "verify": verify, "other": other}
    gaps = idle_gaps_us(spans)
    overhead = round(max(0.0, median(gaps) - drafted * 1000.0), 1) if gaps else None
    return {name: round(value, 4) for name, value in parts.items()}, overhead


def _median_ms(spans: Sequence[TrackSpan], track: str, otherwise: float) -> float:
    found = [span.ms for span in spans if span.track == track]
    return median(found) if found else otherwise
