"""Output of the benchmarks: progress on stderr, a table on stdout, and JSON on request."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

import numpy as np

PERCENTILES = (50, 90, 95, 99)


def print_progress(line: str) -> None:
    """Print a line of progress to stderr."""
    print(line, file=sys.stderr, flush=True)


def format_table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(headers) + " |", "|" + "---|" * len(headers)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return the percentiles by name (p50, p90, p95 and p99); an empty dict without values."""
    if not values:
        return {}
    found = np.percentile(np.asarray(values), PERCENTILES)
    return {f"p{p}": round(float(v), 4) for p, v in zip(PERCENTILES, found, strict=True)}


def print_result(args: argparse.Namespace, result: dict[str, object]) -> None:
    """Print the result as a table and, with --json, as one JSON object in the last line. With --out
    also write it to a file."""
    flat = [(key, value) for key, value in result.items() if not isinstance(value, dict | list)]
    print(format_table(("figure", "value"), flat))
    for key, value in result.items():
        if isinstance(value, dict | list):
            print(f"\n{key}: {json.dumps(value)}")
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if args.json:
        print(json.dumps(result), flush=True)
