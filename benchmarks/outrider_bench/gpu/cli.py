"""`outrider bench gpu NAME`: benchmarks of the device engine, one command each.

`gpu all --only verify,draft,plain` runs several of them with models that are loaded once.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
import traceback
from pathlib import Path
from typing import Any, Final

from outrider.errors import InternalError, InvalidRequestError
from outrider_bench.report import print_progress

NAMES: Final = {
    "kernels": "kernel times against bytes moved",
    "verify": "a verify forward by rows and nodes",
    "draft": "a draft step, and a catch-up with a chain of five",
    "ahead": "a pass of look-ahead: draft, scores, branches",
    "plain": "plain decoding end to end",
    "rounds": "rounds on one device, SIMULATED acceptance, with a timeline",
    "swap": "a session out and in, beside the rounds of others",
    "ideas": "each of the five ideas before and after",
    "serving": "tokens/s, time to first token, inter-token latency by placement",
    "placement": "widened model: tokens/s by placement and the split of a round",
    "equality": "greedy text with and without speculation, differences explained",
    "acceptance": "tokens a round and time a token by rule and temperature",
    "summary": "merge the results of a folder",
}
"""Help text of each benchmark. `all` runs them in this order, in which benchmarks that use the same
model follow each other."""
_MODULES: Final = {"rounds": "simulated_rounds", "ideas": "ablation", "equality": "lossless"}
"""Name of the module of each benchmark whose module has another name than the benchmark."""
ALL: Final = "all"
DEFAULT_OUT: Final = Path("benchmarks/results/gpu")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmarks and their flags."""
    from outrider_bench.gpu.support.benchmark_context import add_arguments as add_flags

    commands = parser.add_subparsers(dest="gpu_name", metavar="NAME", required=True)
    for name, text in {**NAMES, ALL: "several of them, models loaded once"}.items():
        command = commands.add_parser(name, help=text, description=text)
        add_flags(command)
        if name == ALL:
            command.add_argument("--only", help="comma-separated names; default: all")
            command.set_defaults(out=DEFAULT_OUT)


def run(args: argparse.Namespace) -> None:
    """Run the requested benchmarks. Raises InternalError if a benchmark of `all` failed."""
    from outrider_bench.gpu.support.benchmark_context import Bench

    bench = Bench(args)
    try:
        if args.gpu_name != ALL:
            finish(args, args.gpu_name, import_part(args.gpu_name).run(bench))
            return
        failed = run_all(bench, chosen(args.only))
    finally:
        bench.close()
    if failed:
        raise InternalError(f"these parts failed: {', '.join(failed)}", reason="PARTS_FAILED")


def chosen(only: str | None) -> list[str]:
    """Return the benchmarks that the flag --only of `all` lists, in the order of NAMES; all of them
    if it is not given. Raises InvalidRequestError for unknown names."""
    if only is None:
        return list(NAMES)
    wanted = only.split(",")
    unknown = sorted(set(wanted) - set(NAMES))
    if unknown:
        raise InvalidRequestError(f"no such benchmark: {', '.join(unknown)}")
    return [name for name in NAMES if name in wanted]


def run_all(bench: Any, names: list[str]) -> list[str]:
    """Run benchmarks one after the other and write their results. A benchmark that fails is
    reported and skipped. Return the names of those that failed."""
    from outrider_bench.gpu.summary import write_summary
    from outrider_bench.gpu.support.benchmark_context import free_memory

    failed = []
    for name in names:
        began = time.perf_counter()
        try:
            finish(bench.args, name, import_part(name).run(bench))
        except Exception as error:
            failed.append(name)
            traceback.print_exc()
            print_progress(f"{name} FAILED: {type(error).__name__}: {error}")
        free_memory()
        print_progress(f"{name}: {time.perf_counter() - began:.1f} s")
    if bench.args.out is not None and "summary" not in names and len(failed) < len(names):
        write_summary(bench.args.out)
    return failed


def finish(args: argparse.Namespace, name: str, result: dict[str, object]) -> None:
    """Write the result of a benchmark to the file NAME.json in the folder --out, and print it if
    --json is set. The benchmark `summary` writes its file itself."""
    if args.out is not None and name != "summary":
        args.out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(result, indent=2) + "\n"
        (args.out / f"{name}.json").write_text(text, encoding="utf-8")
    if args.json:
        print(json.dumps(result), flush=True)


def import_part(name: str) -> Any:
    """Return the module of the benchmark with this name."""
    return importlib.import_module(f"outrider_bench.gpu.{_MODULES.get(name, name)}")
