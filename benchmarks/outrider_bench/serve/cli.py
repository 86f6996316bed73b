"""`outrider bench serve`: whole requests through the router, in every placement.

It starts the router, verifiers and drafters of each placement in turn, or uses a running router.
Separate client processes send requests, either in a closed loop or at random times (Poisson). It
reports tokens/s, latencies, efficiency, and the ratio of tokens/s to plain decoding of the same
requests.
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
    add(
        "--router",
        metavar="HOST:PORT",
        help="Address of a running router. Default: start the services.",
    )
    add(
        "--placement",
        metavar="A,B",
        help="Placements to measure: plain, separate, colocated, fused. plain is always measured, "
        "unless --in-turn adds plain waves. Default: plain,separate.",
    )
    add(
        "--model",
        default=DEFAULT_MODEL,
        help="Name or directory of the model, or `widened` for a random model with the cost of 8B. "
        "With --router, the directory of the model that it serves.",
    )
    add(
        "--wide",
        metavar="SHAPE",
        help="Shape of a widened model: HIDDEN,INNER,LAYERS,HEADS,KV_HEADS.",
    )
    add("--head", type=Path, help="Draft head. Default: the head shipped for the model.")
    add("--draft-model", metavar="NAME|DIR", help="Model that drafts with --drafter model.")
    add(
        "--verifiers",
        type=integer_at_least(1),
        metavar="N",
        default=1,
        help="Number of verifiers of a placement. Default: 1.",
    )
    add(
        "--drafters",
        type=integer_at_least(1),
        metavar="N",
        default=1,
        help="Number of drafters, which all verifiers share. Default: 1.",
    )
    add(
        "--routers",
        type=integer_at_least(1),
        metavar="N",
        default=1,
        help="Number of routers at one address; with --router, the number that runs. Default: 1.",
    )
    add(
        "--no-prefix-cache",
        action="store_true",
        help="Compute every prompt from its beginning. With --router, state it if that is so.",
    )
    add(
        "--device-exchange",
        choices=EXCHANGE_MODES,
        nargs="?",
        const=ON,
        help="Whether separate drafters exchange with verifiers between devices. With --router, "
        "state `on` if they do. Default: auto, which is on if each process has its own GPU.",
    )
    add(
        "--batch-invariant",
        action="store_true",
        help="Verifiers compute the same bits for a token whatever runs beside it. With --router, "
        "state it if they do.",
    )
    add("--device", choices=DEVICES, help="Device of the models. Default: cuda if there is a GPU.")
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="Dtype of the models. Default: bfloat16 on GPUs, else float32.",
    )
    add("--threads", type=integer_at_least(1), help="Compute threads of each verifier and drafter.")
    add(
        "--busy-polling-cores",
        type=integer_at_least(0),
        help="CPU cores that each model process keeps busy-polling. Default: "
        f"{BUSY_POLLING_CORES} with separate drafters, if there are enough cores.",
    )
    add(
        "--planner",
        choices=PLANNERS,
        help="fixed: sessions speculate as requested, even if it is slower. Default: automatic.",
    )
    _add_drafts(parser)
    _add_load(parser)
    add(
        "--out",
        type=Path,
        metavar="FILE",
        help="File (service.json) into which the cells are merged.",
    )
    add(
        "--merge",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="Merge these files into --out and measure nothing.",
    )
    add(
        "--keep-plain",
        action="store_true",
        help="Do not measure plain cells again that --out has for this commit and machine.",
    )
    add("--plot", type=Path, metavar="FILE.svg", help="Chart of tokens/s over sessions.")
    add("--trace-dir", type=Path, help="Directory for the timelines of started processes.")
    add("--log-dir", type=Path, help="Directory for the logs of started processes.")
    add("--json", action="store_true", help="Print one JSON object as the last line.")


def _add_drafts(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--drafter", choices=DRAFTERS, default=DRAFTERS[0], help="Draft method. Default: eagle3.")
    add(
        "--draft-tokens",
        type=integer_at_least(1),
        metavar="N",
        help="Draft tokens per round. Default: that of the server.",
    )
    add(
        "--draft-top-k",
        type=integer_at_least(1),
        metavar="K",
        default=1,
        help="Branching factor of drafts; 1 (default) drafts chains.",
    )
    add(
        "--drafts",
        metavar="A,B",
        help="Several drafts in one run, instead of the three flags above: auto, ngram, chain-3, "
        "tree-32, tree-32x4. The suffixes +ahead, +ahead16 (16 outcomes) and +lockstep replace "
        "--look-ahead.",
    )
    add(
        "--look-ahead",
        metavar="A,B",
        help="Look-ahead of each of the drafts: 0 in lock-step, 1 ahead of verdicts (always with "
        "--planner fixed, else if it is faster), auto for the router's default. Default: auto.",
    )
    add(
        "--fan-out",
        metavar="N",
        type=parse_fan_out,
        help="Outcomes drafted ahead. Default: that of the drafter.",
    )
    add(
        "--exchange-delay-ms",
        metavar="A,B",
        help="Delays between verifier and drafter in each direction; the services start once for "
        "each. Default: 0.",
    )
    add(
        "--round-ms",
        type=number_at_least(0.0),
        default=0.0,
        help="EMULATED: duration of a round of one row, to stand for a larger model.",
    )
    add(
        "--row-us",
        type=number_at_least(0.0),
        default=0.0,
        help="EMULATED: microseconds that each further row adds to such a round.",
    )
    add(
        "--drafter-slowdown",
        metavar="A,B",
        help="Factors by which drafts take longer; the services start once for each. Default: 1.",
    )
    add(
        "--temperature",
        metavar="A,B",
        help="Temperatures. Default: 0, which is greedy; 0 to 2 with --grid.",
    )
    add("--rule", choices=[rule.value for rule in Rule], default=Rule.COUPLED.value)
    add("--top-p", type=float, default=1.0)
    add("--min-p", type=float, default=0.0)
    add("--repetition-penalty", type=float, default=1.0)
    add(
        "--sampling", metavar="A,B", help=f"Several sets of sampling parameters: {', '.join(SETS)}."
    )
    add("--ignore-eos", action="store_true", help="Answers continue up to --max-tokens.")


def _add_load(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--sessions", metavar="A,B", help="Numbers of concurrent requests. Default: 1,8,32.")
    add(
        "--rate",
        type=float,
        metavar="R",
        help="Instead of --sessions: R requests/s with random arrival times.",
    )
    add(
        "--prompts",
        type=Path,
        default=DEFAULT_PROMPTS,
        help="JSONL file of prompts; see outrider_bench.long_prompts for long ones. Default: the "
        "bundled 40.",
    )
    add("--limit", type=integer_at_least(1), help="Number of prompts. Default: all.")
    add(
        "--max-tokens",
        type=integer_at_least(2),
        metavar="N",
        help="Length of answers. Default: 256; 64 with --grid.",
    )
    add(
        "--waves",
        type=integer_at_least(1),
        help="Waves of requests; the last is reported. Default: 3; 2 with --grid.",
    )
    add(
        "--in-turn",
        action="store_true",
        help="Before each wave with drafts, run the same requests without drafts.",
    )
    add(
        "--requests",
        type=integer_at_least(1),
        help="Minimum number of requests of a wave. Default: 16; 8 with --grid.",
    )
    add(
        "--clients",
        type=integer_at_least(1),
        help="Client processes. Default: as many as the cores allow, up to 8.",
    )
    add(
        "--grid",
        action="store_true",
        help="Measure all combinations of temperatures, sessions, placements and drafts briefly.",
    )
    add("--budget-s", type=float, help="Skip cells that would end after this many seconds.")


def run(args: argparse.Namespace) -> None:
    """Run the benchmark and print its results. Raises InternalError if a part of it failed."""
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
    """Return the number of busy-polling cores of each verifier and drafter process, by
    placement."""
    if args.busy_polling_cores is not None:
        return {placement: args.busy_polling_cores for placement in PLACEMENTS}
    spare = len(os.sched_getaffinity(0)) > 4 * BUSY_POLLING_CORES
    return {SEPARATE: BUSY_POLLING_CORES} if args.device == CUDA and spare else {}


def _default_device() -> str:
    import torch

    return CUDA if torch.cuda.is_available() else CPU


def _report(args: argparse.Namespace, content: dict[str, object]) -> None:
    """Print the table and the JSON, and write the chart."""
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
    """Return the table row of a cell."""
    first, between = cell["ttft_ms"], cell["itl_ms"]
    load = cell["sessions"] if cell["rate"] is None else f"{cell['rate']}/s"
    speeds = (cell["tokens_per_s"], cell["steady_tokens_per_s"], results.over_plain(cell))
    figures = ("over_lockstep", "efficiency", "emitted_per_round", "first_wave_ratio")
    drafts = f"{cell['drafts']}{handicap_of(cell)}"
    where = (cell["placement"], drafts, cell["temperature"], cell["rule"], load)
    times = (first.get("p50"), first.get("p99"), between.get("p50"), between.get("p99"))
    return (*where, *speeds, *(cell[name] for name in figures), *times)
