"""Cost of drafting by number of sessions: one step, and a catch-up with a chain of five.

A catch-up is the head's pass over the newly accepted tokens of a round.
"""

from __future__ import annotations

from contextlib import closing

from outrider_bench.gpu.support.benchmark_context import Bench, show
from outrider_bench.gpu.support.steps import DraftBench

CHAIN = 5


def run(bench: Bench) -> dict[str, object]:
    """Measure drafting at every number of sessions and return the result for the JSON file.

    A chain of one draft token needs only the catch-up, in which the head reads the newly accepted
    tokens. A chain of five needs four more steps of the head, so the time of a step is a quarter of
    the difference.
    """
    models = bench.random()
    rows, table = [], {}
    with closing(DraftBench(bench, models, max_rows=max(bench.batches))) as draft:
        for batch in bench.batches:
            one, five = (
                draft.median_ms(draft.chain(batch, length, new_rows=CHAIN + 1))
                for length in (1, CHAIN)
            )
            step = (five - one) / (CHAIN - 1)
            table[str(batch)] = {
                "first_ms": round(one, 4),
                "step_ms": round(step, 4),
                "chain5_ms": round(five, 4),
            }
            rows.append((batch, round(one, 3), round(step, 3), round(five, 3)))
    head = models.head
    assert head is not None
    vocab = head.config.draft_vocab_size
    show(
        f"drafting, {models.name}, draft vocabulary {vocab}, catch-up on {CHAIN + 1} rows",
        ("sessions", "catch-up + 1 ms", "step ms", "catch-up + chain of 5 ms"),
        rows,
    )
    first = table[str(bench.batches[0])]
    figures = {}
    if bench.batches[0] == 1:
        figures = {"draft_step_ms": first["step_ms"], "chain5_ms": first["chain5_ms"]}
    return bench.result("draft", models, draft_vocab=vocab, by_sessions=table, figures=figures)
