"""`outrider bench serve`: whole requests through the router, in every placement.

Starts router, verifier and drafter of each placement in turn (or takes a running router), sends
closed or Poisson loads from separate client processes, and reports tokens/s, latencies, efficiency
and the ratio to plain decoding of the same requests.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any, Final

from outrider.client.flags import integer_at_least, number_at_least, parse_fan_out
from outrider.client.local.config import CPU, CUDA, DEVICES, SEPARATE
from outrider.client.local.model_files import DEFAULT_MODEL
from outrider.errors import InternalError, InvalidRequestError
from outrider.spec.exchange_mode import EXCHANGE_MODES, ON
from outrider.spec.sampling import Rule
from outrider_bench.gpu.support.machine import BUSY_POLLING_CORES
from outrider_bench.prompts import DEFAULT_PROMPTS
from outrider_bench.report import format_table
from outrider_bench.serve import results
from outrider_bench.serve.cells import PLACEMENTS, SETS, handicap_of
from outrider_bench.serve.chart import write_chart
from outrider_bench.serve.run import BenchRun

PLANNERS: Final = ("automatic", "fixed")
DRAFTERS: Final = ("eagle3", "ngram", "model")
HEADERS: Final = (
    *("placement", "drafts", "T", "rule", "load", "tokens/s", "steady", "over plain"),
    *("lock-step", "efficiency", "a round", "first/last", "TTFT p50", "p99", "ITL p50", "p99"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    add("--router", metavar="HOST:PORT", help="a running router; default: start what is needed")
    add(
        "--placement",
        metavar="A,B",
        help="plain, separate, colocated, fused; plain is always measured, unless it "
        "has waves --in-turn; default: plain,separate",
    )
    add(
        "--model",
        default=DEFAULT_MODEL,
        help="name, directory, or widened (8B cost); with a --router of this host the directory of "
        "what it serves, for the lab's rounds",
    )
    add("--wide", metavar="SHAPE", help="widen --model: HIDDEN,INNER,LAYERS,HEADS,KV_HEADS")
    add("--head", type=Path, help="draft head; default: the one that ships for the model")
    add("--draft-model", metavar="NAME|DIR", help="for --drafter model")
    add(
        "--verifiers",
        type=integer_at_least(1),
        metavar="N",
        default=1,
        help="of a placement; default: 1",
    )
    add(
        "--drafters",
        type=integer_at_least(1),
        metavar="N",
        default=1,
        help="that these share; default: 1",
    )
    add(
        "--routers",
        type=integer_at_least(1),
        metavar="N",
        default=1,
        help="at one address, or with --router what runs there; default: 1",
    )
    add(
        "--no-prefix-cache",
        action="store_true",
        help="every prompt is computed from its beginning; with --router say so if it is",
    )
    add(
        "--device-exchange",
        choices=EXCHANGE_MODES,
        nargs="?",
        const=ON,
        help="whether separate drafters exchange with verifiers between devices; with --router say "
        "on if they do; default: auto, where each has a GPU of its own",
    )
    add("--device", choices=DEVICES, help="default: cuda where there is one")
    add("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on GPUs, else float32")
    add("--threads", type=integer_at_least(1), help="compute threads of verifier and drafter each")
    add(
        "--busy-polling-cores",
        type=integer_at_least(0),
        help="CPU cores that each model process keeps busy-polling; default: "
        f"{BUSY_POLLING_CORES} for separate drafters where there are cores to spare",
    )
    add(
        "--planner",
        choices=PLANNERS,
        help="fixed: sessions speculate as asked, whatever that gives; default: automatic",
    )
    _add_drafts(parser)
    _add_load(parser)
    add("--out", type=Path, metavar="FILE", help="service.json to merge the cells into")
    add("--merge", type=Path, nargs="+", metavar="FILE", help="merge these into --out, no runs")
    add(
        "--keep-plain",
        action="store_true",
        help="plain cells that --out has of this commit and machine are not measured again",
    )
    add("--plot", type=Path, metavar="FILE.svg", help="tokens/s over sessions")
    add("--trace-dir", type=Path, help="where started processes leave their timelines")
    add("--log-dir", type=Path, help="where the logs of started processes stay")
    add("--json", action="store_true", help="last line of the output is one JSON object")


def _add_drafts(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--drafter", choices=DRAFTERS, default=DRAFTERS[0], help="default: eagle3")
    add(
        "--draft-tokens",
        type=integer_at_least(1),
        metavar="N",
        help="a round; default: the server's own",
    )
    add(
        "--draft-top-k",
        type=integer_at_least(1),
        metavar="K",
        default=1,
        help="1 (default) is a chain",
    )
    add(
        "--drafts",
        metavar="A,B",
        help="several at once, instead of the three: auto, ngram, chain-3, tree-32, tree-32x4; "
        "chain-3+ahead, +ahead16 (outcomes) and +lockstep say what --look-ahead does",
    )
    add(
        "--look-ahead",
        metavar="A,B",
        help="each of the drafts in each of these ways: 0 in lock-step, 1 ahead of verdicts (with "
        "--planner fixed always, else where it pays), auto as the router says; default: auto",
    )
    add(
        "--fan-out",
        metavar="N",
        type=parse_fan_out,
        help="outcomes drafted ahead; default: drafter's",
    )
    add(
        "--exchange-delay-ms",
        metavar="A,B",
        help="each way between verifier and drafter; a start of services each; default: 0",
    )
    add(
        "--round-ms",
        type=number_at_least(0.0),
        default=0.0,
        help="EMULATED: rounds of one row last so long, as with a larger model",
    )
    add(
        "--row-us",
        type=number_at_least(0.0),
        default=0.0,
        help="of each further row of such a round",
    )
    add(
        "--drafter-slowdown",
        metavar="A,B",
        help="how many times as long drafts take, by waiting; a start of services each; default: 1",
    )
    add("--temperature", metavar="A,B", help="0 (default) is greedy; of a grid: 0 to 2")
    add("--rule", choices=[rule.value for rule in Rule], default=Rule.COUPLED.value)
    add("--top-p", type=float, default=1.0)
    add("--min-p", type=float, default=0.0)
    add("--repetition-penalty", type=float, default=1.0)
    add("--sampling", metavar="A,B", help=f"several at once, instead: {', '.join(SETS)}")
    add("--ignore-eos", action="store_true", help="answers go on to --max-tokens")


def _add_load(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--sessions", metavar="A,B", help="requests at a time; default: 1,8,32")
    add("--rate", type=float, metavar="R", help="instead: R requests/s that arrive at random")
    add(
        "--prompts",
        type=Path,
        default=DEFAULT_PROMPTS,
        help="JSONL, see outrider_bench.long_prompts for long ones; default: the bundled 40",
    )
    add("--limit", type=integer_at_least(1), help="number of prompts; default: all")
    add("--max-tokens", type=integer_at_least(2), metavar="N", help="default: 256; of a grid: 64")
    add("--waves", type=integer_at_least(1), help="default: 3; of a grid: 2; the last is reported")
    add(
        "--in-turn",
        action="store_true",
        help="before each wave with drafts one of the same requests without, of the same services",
    )
    add(
        "--requests",
        type=integer_at_least(1),
        help="of a wave, at least; default: 16; of a grid: 8",
    )
    add(
        "--clients",
        type=integer_at_least(1),
        help="client processes; default: what cores allow, up to 8",
    )
    add("--grid", action="store_true", help="temperatures x sessions x placements x drafts, short")
    add("--budget-s", type=float, help="leave out the cells that would end later than this")


def run(args: argparse.Namespace) -> None:
    """Measure and report. Raises InternalError if a part failed."""
    if args.merge:
        if args.out is None:
            raise InvalidRequestError("--merge needs --out, the file to merge into")
        _report(args, results.merge_files(args.out, args.merge))
        return
    args.device = args.device or _default_device()
    job = BenchRun(args, _busy_polling_cores(args))
    _report(args, job.measure())
    if job.failed:
        raise InternalError(f"these failed: {'; '.join(job.failed)}", reason="PARTS_FAILED")


def _busy_polling_cores(args: argparse.Namespace) -> dict[str, int]:
    """Awake cores by placement."""
    if args.busy_polling_cores is not None:
        return {placement: args.busy_polling_cores for placement in PLACEMENTS}
    spare = len(os.sched_getaffinity(0)) > 4 * BUSY_POLLING_CORES
    return {SEPARATE: BUSY_POLLING_CORES} if args.device == CUDA and spare else {}


def _default_device() -> str:
    import torch

    return CUDA if torch.cuda.is_available() else CPU


def _report(args: argparse.Namespace, content: dict[str, object]) -> None:
    """Table, picture and JSON."""
    cells = content["cells"]
    assert isinstance(cells, list)
    print(format_table(HEADERS, [row(cell) for cell in cells]), flush=True)
    for name in (results.FLOOR, *results.OTHERS):
        if content.get(name) is not None:
            print(f"{name}: {json.dumps(content[name])}", flush=True)
    left_out = content.get(results.LEFT_OUT, [])
    assert isinstance(left_out, list)
    if left_out:
        print(f"{len(left_out)} cells left out, listed in left_out", flush=True)
    if args.plot is not None:
        write_chart(args.plot, cells)
    if args.json:
        print(json.dumps(content), flush=True)


def row(cell: dict[str, Any]) -> tuple[object, ...]:
    """A line of the table."""
    first, between = cell["ttft_ms"], cell["itl_ms"]
    load = cell["sessions"] if cell["rate"] is None else f"{cell['rate']}/s"
    speeds = (cell["tokens_per_s"], cell["steady_tokens_per_s"], results.over_plain(cell))
    figures = ("over_lockstep", "efficiency", "emitted_per_round", "first_wave_ratio")
    drafts = f"{cell['drafts']}{handicap_of(cell)}"
    where = (cell["placement"], drafts, cell["temperature"], cell["rule"], load)
    times = (first.get("p50"), first.get("p99"), between.get("p50"), between.get("p99"))
    return (*where, *speeds, *(cell[name] for name in figures), *times)
