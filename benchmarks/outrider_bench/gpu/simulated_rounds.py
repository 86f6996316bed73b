"""Round times with simulated acceptance and the drafter on the target's device, with a timeline."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

from outrider.process_tuning import run_event_loop as run_loop
from outrider_bench.gpu.plain import measure, sized
from outrider_bench.gpu.support.benchmark_context import Bench, show, simulated
from outrider_bench.gpu.support.load_driver import drive_sessions, random_prompts
from outrider_bench.gpu.support.services import (
    COLOCATED,
    FUSED,
    LoadedModels,
    RunningService,
    ServingSetup,
    serve_models,
)
from outrider_bench.gpu.support.svg import write_svg
from outrider_bench.gpu.support.timeline import (
    HOST,
    TRACKS,
    HostTimeline,
    device_spans,
    idle_gaps_us,
    round_overhead_us,
    select_rounds,
    split_ms,
)
from outrider_bench.gpu.support.trace import TrackSpan, write_trace

VLLM_MS = {
    3: {1: 5.71, 8: 6.11, 32: 7.43, 64: 10.40},
    5: {1: 6.30, 8: 6.88, 32: 9.31, 64: 14.35},
}
TIMELINE_TOKENS = 96
TIMELINE_ROUNDS = 5


def run(bench: Bench) -> dict[str, object]:
    """Measure each draft length at each batch size, fused and colocated, and return the result for
    the JSON file. The reported figure is that of the faster placement."""
    models = bench.random()
    cells: dict[str, float] = {}
    chosen: dict[str, str] = {}
    details: dict[str, object] = {}
    rows = []
    for length in bench.drafts:
        by_placement = {
            placement: run_loop(
                measure(
                    bench,
                    models,
                    ServingSetup(
                        placement=placement, draft_length=length, simulated=simulated(length)
                    ),
                )
            )
            for placement in bench.placements(FUSED, COLOCATED)
        }
        for batch in bench.batches:
            times = {name: waves[batch].round_ms for name, waves in by_placement.items()}
            best = min(times, key=lambda name: times[name])
            key = f"K{length}x{batch}"
            cells[key], chosen[key] = round(times[best], 4), best
            details[key] = {n: waves[batch].summary() for n, waves in by_placement.items()}
            emitted = round(by_placement[best][batch].mean_emitted, 2)
            peer = VLLM_MS.get(length, {}).get(batch, "")
            rows.append((length, batch, *(round(t, 3) for t in times.values()), peer, emitted))
    show(
        f"rounds, {models.name}, SIMULATED acceptance",
        ("K", "batch", *bench.placements(FUSED, COLOCATED), "vLLM 0.26 on H200", "emitted"),
        rows,
    )
    timelines = timeline(bench, models)
    figures: dict[str, object] = {"round_ms": cells}
    overhead = timelines.get(COLOCATED, {}).get("round_overhead_us")
    if overhead is not None:
        figures["round_overhead_us"] = {"inproc": overhead}
    return bench.result(
        "rounds",
        models,
        acceptance="SIMULATED",
        simulated_mean={str(length): simulated(length) for length in bench.drafts},
        placement_of_figure=chosen,
        by_shape=details,
        timelines=timelines,
        figures=figures,
    )


def timeline(bench: Bench, models: LoadedModels) -> dict[str, dict[str, Any]]:
    """Record rounds at the smallest batch size, colocated and fused, and write traces and pictures
    of them. Return the figures of each timeline by placement."""
    found = {}
    for placement in bench.placements(COLOCATED, FUSED):
        length = bench.drafts[0]
        setup = ServingSetup(
            placement=placement, draft_length=length, simulated=simulated(length), record=True
        )
        spans = run_loop(recorded(bench, models, setup, batch=bench.batches[0]))
        found[placement] = describe_spans(spans)
        title = f"{models.name}, {placement}, K = {length}, batch {bench.batches[0]}, SIMULATED"
        save(bench.args.out, f"timeline-{placement}", spans, title)
    rows = [(name, facts["round_overhead_us"], facts["rounds"]) for name, facts in found.items()]
    show("device idle between two verify forwards, less drafting", ("", "us", "rounds"), rows)
    return found


async def recorded(
    bench: Bench,
    models: LoadedModels,
    setup: ServingSetup,
    *,
    batch: int,
    tokens: int = TIMELINE_TOKENS,
) -> list[TrackSpan]:
    """Serve the models, run a warm-up and one wave, and return the host and device spans of the
    wave's rounds. All times are on one clock."""
    async with serve_models(models, replace(sized(bench, setup), max_sessions=batch)) as running:
        vocab = models.target.vocab_size
        prompts = random_prompts(batch, bench.prompt_tokens, vocab)
        await drive_sessions(running, prompts, min(24, bench.output_tokens), tag="warm")
        return await record_wave(running, prompts, min(tokens, bench.output_tokens))


async def record_wave(
    running: RunningService, prompts: list[list[int]], tokens: int
) -> list[TrackSpan]:
    """Run one wave and return its host and device spans."""
    host = HostTimeline()
    wrap_engine(running, host)
    if running.recorder is not None:
        running.recorder.take_spans()
    origin = _device_origin(running, host)
    await drive_sessions(running, prompts, tokens, tag="timeline")
    if running.recorder is None:
        return host.spans
    spans = running.recorder.take_spans()
    return host.spans + device_spans(spans, offset_ms=origin)


def wrap_engine(running: RunningService, host: HostTimeline) -> None:
    """Make the steps of each round on the host record their times in `host`."""
    service: Any = running.service
    rounds, engine = service.rounds, running.runner or service.core.runner
    host.wrap(rounds, "plan_round", "plan")
    host.wrap(engine, "submit_round", "submit")
    host.wrap(engine, "collect_round", "collect (wait)")
    host.wrap(rounds, "_book", "settle")
    loop = getattr(service, "_loop", None)
    if loop is not None:
        host.wrap(loop, "_flush", "dispatch")


def _device_origin(running: RunningService, host: HostTimeline) -> float:
    """Return the host time, in milliseconds, at the origin of the recorder's clock."""
    import torch

    recorder = running.recorder
    if recorder is None or not recorder.enabled:
        return 0.0
    torch.cuda.synchronize()
    with recorder.record_span("align"):
        at = host.now_ms
    spans = recorder.take_spans()
    return at - float(spans[-1].start_ms)


def describe_spans(spans: list[TrackSpan]) -> dict[str, Any]:
    """Return the figures of a timeline: the number of rounds, the gaps between forwards, and the
    median duration of each kind of span."""
    gaps = idle_gaps_us(spans)
    overhead = round_overhead_us(spans)
    return {
        "rounds": len(gaps) + 1 if gaps else 0,
        "round_overhead_us": None if overhead is None else round(overhead, 1),
        "gap_us_sorted": [round(gap, 1) for gap in sorted(gaps)],
        "median_ms": split_ms(spans),
    }


def save(out: Path | None, name: str, spans: list[TrackSpan], title: str) -> None:
    """Write all spans to NAME.trace.json, and a picture of some rounds in the middle to NAME.svg,
    in the folder `out`. Do nothing if `out` is None or there are no spans."""
    if out is None or not spans:
        return
    write_trace(out / f"{name}.trace.json", spans, TRACKS, title=title)
    shown = select_rounds(spans, TIMELINE_ROUNDS, skip=8) or copy.copy(spans)
    used = [track for track in TRACKS if any(span.track == track for span in shown)]
    write_svg(out / f"{name}.svg", shown, used or [HOST], title=title)
