"""Ablation of five optimisations, each measured before and after in this system.

* 1: Sums of log-probs rank the candidates of a draft tree, instead of products of probabilities.
* 2: A single candidate is chosen by argmax, instead of softmax and top-k.
* 3: In a catch-up (the head's pass over newly accepted tokens), rows whose output is not needed
  stop after they have written their KV.
* 4: One CUDA graph runs verification and drafting, instead of two.
* 5: Drafts are accepted with draft probabilities (p/q rejection), instead of as if each draft token
  had probability 1.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from statistics import median
from typing import Any

import torch
from torch import Tensor

from outrider.engine.kernels.drafts.topk import log_softmax_topk
from outrider.engine.kernels.sampling import choose_tokens
from outrider.engine.kernels.session_tensors import NUM_STREAMS, RULE_GREEDY, SamplingState
from outrider_bench.gpu import acceptance, serving
from outrider_bench.gpu.support.benchmark_context import Bench, show
from outrider_bench.gpu.support.draft_ablation import chains_by_choice, trees_by_score
from outrider_bench.gpu.support.services import COLOCATED, FUSED, PLAIN
from outrider_bench.gpu.support.steps import DraftBench, kernel_names, timed_ms
from outrider_bench.gpu.support.tree_scores import CERTAIN, DEPTH, torn_tree, tree_acceptance
from outrider_bench.report import print_progress

VOCABULARIES = (32_000, 128_256)
STEP_ROWS = (1, 8, 64)
TOP_K = 8
DEAD_LENGTHS = (3, 5, 7)


def run(bench: Bench) -> dict[str, object]:
    """Measure all five optimisations and return the result for the JSON file. An optimisation whose
    measurement fails is reported and left out."""
    found: dict[str, Any] = {}
    figures: dict[str, object] = {}
    ideas: tuple[tuple[str, Callable[[Bench], tuple[Any, dict[str, object]]]], ...] = (
        ("1 log-probs", log_probs),
        ("2 argmax", argmax),
        ("3 dead positions", dead_positions),
        ("4 fused graph", fused_graph),
        ("5 draft probabilities", draft_probabilities),
    )
    failed = []
    for name, measure in ideas:
        try:
            found[name], more = measure(bench)
            figures |= more
        except Exception as error:
            failed.append(name)
            print_progress(f"idea {name} FAILED: {type(error).__name__}: {error}")
    return bench.result("ideas", None, ideas=found, failed=failed, figures=figures)


# ---- 1 -----------------------------------------------------------------------------------------


def log_probs(bench: Bench) -> tuple[dict[str, Any], dict[str, object]]:
    """Measure both ways to score candidates: their times, the acceptance of the trees, and how many
    nodes of a tree lack an ancestor.

    Returns the measurements and an empty dict, because the summary has no figure for them.
    """
    rows = []
    for count in STEP_ROWS:
        logits = _logits(bench, count, VOCABULARIES[0])
        parents = torch.zeros(count, 1, device=bench.device)
        ones = torch.ones(count, 1, dtype=torch.bfloat16, device=bench.device)

        def products(logits: Tensor = logits, ones: Tensor = ones) -> Tensor:
            return ones * logits.softmax(-1).to(torch.bfloat16).topk(TOP_K).values

        def sums(logits: Tensor = logits, parents: Tensor = parents) -> Tensor:
            return parents + log_softmax_topk(logits, TOP_K, temperatures=None)[0]

        rows.append((count, *(_us(bench, fn) for fn in (products, sums))))
    torn = {name: torn_tree(name == "sums") for name in ("products", "sums")}
    show(
        f"idea 1: candidates of a row among {VOCABULARIES[0]}, top-k {TOP_K}",
        ("rows", "softmax, top-k, products us", "log-softmax with top-k, sums us"),
        rows,
    )
    case = [(name, *facts.values()) for name, facts in torn.items()]
    headers = ("score", "distinct scores", "nodes without their parent, at worst")
    show(f"idea 1: a chain of {DEPTH}, p = {CERTAIN}, the better half is kept", headers, case)
    accepted = tree_acceptance(bench)
    rows_of = [(name, *facts.values()) for name, facts in accepted.items()]
    show("idea 1: greedy trees, real model", ("score", "tokens a round", "answers"), rows_of)
    times = [dict(zip(("rows", "products_us", "sums_us"), row, strict=True)) for row in rows]
    trees = trees_by_score(bench)
    return {"times": times, "trees": trees, "constructed": torn, "acceptance": accepted}, {}


# ---- 2 -----------------------------------------------------------------------------------------


def argmax(bench: Bench) -> tuple[dict[str, Any], dict[str, object]]:
    """Measure two ways to choose one candidate, softmax with top-k and argmax: their times and
    numbers of kernels.

    Returns the measurements and an empty dict, because the summary has no figure for them.
    """
    rows = []
    for vocabulary in VOCABULARIES:
        for count in STEP_ROWS:
            before, after = _choices(bench, count, vocabulary)
            kernels = [len(kernel_names(fn, bench.device)) for fn in (before, after)]
            rows.append((vocabulary, count, _us(bench, before), _us(bench, after), *kernels))
    show(
        "idea 2: choosing one candidate",
        ("vocabulary", "rows", "softmax + top-k us", "argmax us", "kernels", "kernels"),
        rows,
    )
    names = ("vocabulary", "rows", "before_us", "after_us", "kernels_before", "kernels_after")
    softmax = softmax_in_chain(bench)
    print_progress(f"kernels with softmax in their name in a chain of 5: {softmax}")
    return {
        "times": [dict(zip(names, row, strict=True)) for row in rows],
        "saved_us_by_round": {
            f"K{length}": {
                f"{row[0]}x{row[1]}": round(length * (row[2] - row[3]), 2) for row in rows
            }
            for length in bench.drafts
        },
        "softmax_kernels_in_chain": softmax,
        "chains": chains_by_choice(bench),
    }, {}


def _choices(
    bench: Bench, count: int, vocabulary: int
) -> tuple[Callable[[], object], Callable[[], object]]:
    logits, device = _logits(bench, count, vocabulary), bench.device
    state = SamplingState(
        stream_keys=torch.zeros(count, NUM_STREAMS, dtype=torch.int64, device=device),
        temperatures=torch.zeros(count, device=device),
        rules=torch.full((count,), RULE_GREEDY, dtype=torch.int32, device=device),
    )
    slots = torch.arange(count, dtype=torch.int32, device=device)
    ids = torch.arange(vocabulary, device=device)

    def before() -> object:
        return logits.float().softmax(-1).topk(1)

    def after() -> object:
        return choose_tokens(logits, state, slots, slots, rows_per_slot=1, side="draft", ids=ids)

    return before, after


def softmax_in_chain(bench: Bench) -> list[str] | None:
    """Return the names of the softmax kernels that a greedy chain of five draft tokens launches;
    None if the device is not a CUDA device."""
    if bench.device.type != "cuda":
        return None
    with closing(DraftBench(bench, bench.random(), max_rows=1)) as draft:
        names = kernel_names(draft.chain(1, 5, new_rows=6), bench.device)
    return sorted({name for name in names if "softmax" in name.lower()})


# ---- 3 -----------------------------------------------------------------------------------------


def dead_positions(bench: Bench) -> tuple[dict[str, Any], dict[str, object]]:
    """Time the catch-up of a round, in which the head reads newly accepted tokens: once with all
    rows through the whole layer, and once only with the rows whose output is needed.

    Returns the measurements, and the speedups as a figure for the summary.
    """
    batches = [batch for batch in STEP_ROWS if batch <= max(bench.batches)]
    rows, speedups = [], {}
    with closing(DraftBench(bench, bench.random(), max_rows=max(batches))) as draft:
        for length in DEAD_LENGTHS:
            for batch in batches:
                times = [
                    draft.median_ms(draft.catch_up(batch, new_rows=length + 1, prune=prune))
                    for prune in (False, True)
                ]
                with torch.inference_mode():
                    chains = [
                        draft.chain(batch, length, new_rows=length + 1, prune=prune)().tokens
                        for prune in (False, True)
                    ]
                    same = int((chains[0] == chains[1]).all(dim=1).sum())
                speedup = round(times[0] / times[1], 4)
                speedups[f"{length}x{batch}"] = speedup
                rounded = [round(ms, 4) for ms in times]
                rows.append((length, batch, *rounded, speedup, f"{same}/{batch}"))
    headers = ("K", "sessions", "all rows ms", "live rows ms", "faster", "identical drafts")
    show("idea 3: catch-up on K + 1 rows a session", headers, rows)
    names = ("draft_length", "sessions", "all_ms", "live_ms", "speedup", "identical")
    times_of = [dict(zip(names, row, strict=True)) for row in rows]
    return {"times": times_of}, {"catchup_speedup": speedups}


# ---- 4 and 5 -----------------------------------------------------------------------------------


def fused_graph(bench: Bench) -> tuple[dict[str, Any], dict[str, object]]:
    """Measure the requests per second in three cases: plain decoding, separate CUDA graphs for
    verification and drafting on one device, and one graph for both.

    Returns the measurements, and the ratio of one graph to plain decoding as a figure for the
    summary.
    """
    batches = tuple(b for b in serving.BOTH if b in bench.batches) or bench.batches[-1:]
    results: dict[str, dict[str, Any]] = {}
    for placement in (PLAIN, COLOCATED, FUSED):
        for batch, wave in serving.waves(bench, bench.widened(), placement, batches).items():
            results.setdefault(placement, {})[str(batch)] = serving.describe_wave(wave)
    rows = []
    for key in map(str, batches):
        speeds = {name: results[name][key]["requests_per_s"] for name in results}
        emitted = results[FUSED][key]["emitted_per_round"]
        ratios = [f"{speeds[name] / speeds[PLAIN]:.3f}" for name in (COLOCATED, FUSED)]
        rows.append((key, *(speeds[n] for n in (PLAIN, COLOCATED, FUSED)), *ratios, emitted))
    show(
        "idea 4: requests a second, widened model",
        ("batch", "plain", "two graphs", "one graph", "two/plain", "one/plain", "emitted"),
        rows,
    )
    return {"placements": results}, serving.fused_over_plain(results)


def draft_probabilities(bench: Bench) -> tuple[dict[str, Any], dict[str, object]]:
    """Measure the tokens per round without draft probabilities (rule `target-only`), with them
    (`rejection`) and under `coupled`.

    Returns the measurements, and the tokens per round as a figure for the summary.
    """
    table = acceptance.table(bench)
    rules = ("target-only", "rejection", "coupled")
    rows = []
    for temperature in table[rules[0]]:
        means = [table[rule][temperature]["emitted_per_round"] for rule in rules]
        gain = round(means[1] / means[0], 3) if means[0] and means[1] else None
        times = [table[rule][temperature]["ms_per_token"] for rule in rules]
        rows.append((temperature, *means, gain, *times))
    show(
        f"idea 5: tokens a round by temperature, chain of {acceptance.CHAIN}",
        ("T", *rules, "with/without", *(f"{rule} ms/token" for rule in rules)),
        rows,
    )
    figures = {
        rule: {t: cell["emitted_per_round"] for t, cell in table[rule].items()} for rule in rules
    }
    return {"by_rule": table}, {"acceptance": figures}


def _logits(bench: Bench, rows: int, columns: int) -> Tensor:
    generator = torch.Generator(bench.device).manual_seed(0)
    logits = torch.randn(rows, columns, generator=generator, device=bench.device)
    return (4.0 * logits).to(bench.dtype)


def _us(bench: Bench, fn: Callable[[], object]) -> float:
    times = timed_ms(fn, bench.device, repeats=bench.repeats, graphs=bench.args.graphs)
    return round(median(times) * 1000.0, 2)
