"""Cost of verification by rows and nodes: target, LM head and acceptance, in one graph.

A row is a session, and its nodes are the root and the draft tokens.
"""

from __future__ import annotations

from statistics import median

from outrider_bench.gpu.support.benchmark_context import Bench, show
from outrider_bench.gpu.support.steps import VerifyBench

SHAPES = (
    *((1, nodes) for nodes in (1, 2, 4, 8, 16, 32, 64)),
    *((rows, nodes) for rows in (8, 32, 64) for nodes in (1, 4, 6)),
)


def run(bench: Bench) -> dict[str, object]:
    """Measure the numbers of rows and nodes in SHAPES, up to the largest batch size, and return the
    result for the JSON file."""
    models, floor = bench.random(), bench.floor_ms(bench.random())
    largest = max(bench.batches)
    shapes = [shape for shape in SHAPES if shape[0] <= largest]
    if bench.args.quick:
        shapes = [shape for shape in shapes if shape[1] in (1, 4, 6, 8, 64)]
    verify = VerifyBench(
        models, max_rows=largest, max_tokens=bench.max_tokens, graphs=bench.args.graphs
    )
    cells, rows = {}, []
    try:
        for batch, nodes in shapes:
            times = verify.time_ms(batch, nodes, bench.prompt_tokens, repeats=bench.repeats)
            ms = round(median(times), 4)
            cells[f"{batch}x{nodes}"] = ms
            rows.append((batch, nodes, ms, f"{ms / floor:.2f}", round(max(times), 3)))
    finally:
        verify.close()
    show(
        f"verify, {models.name}, {bench.prompt_tokens} tokens of context, floor {floor} ms",
        ("rows", "nodes", "ms", "x floor", "max ms"),
        rows,
    )
    figures = {"verify_ms": cells, "floor_ms": floor}
    return bench.result(
        "verify", models, context=bench.prompt_tokens, repeats=bench.repeats, figures=figures
    )
