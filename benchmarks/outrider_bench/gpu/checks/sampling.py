"""Check and time the sampling and acceptance kernels on a GPU, against their PyTorch references.

    python -m outrider_bench.gpu.checks.sampling [--out FILE]

Times are microseconds of one call inside a CUDA graph (the median replay of many calls). The inputs
are partly in the cache, as in a round, where the preceding product leaves some of the logits there.
The run takes less than 90 seconds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.engine.kernels.acceptance.matching import accept_matching
from outrider.engine.kernels.acceptance.randomized import (
    DenseChainDistribution,
    SparseDistribution,
    accept_sampled,
)
from outrider.engine.kernels.drafts.topk import log_softmax_topk, log_softmax_topk_torch
from outrider.engine.kernels.sampling import choose_tokens, choose_tokens_torch
from outrider.engine.kernels.session_tensors import (
    NUM_STREAMS,
    RULE_COUPLED,
    RULE_GREEDY,
    RULE_REJECTION,
    RULE_TARGET_ONLY,
    SamplingState,
)
from outrider.errors import FailedPreconditionError
from outrider_bench.environment import describe
from outrider_bench.gpu.checks.tune_linear import seconds
from outrider_bench.report import format_table

ROWS = (1, 8, 64, 384)
VOCABULARIES = (32_000, 128_256)
VOCAB = 128_256
DRAFT_VOCAB = 32_000
NODES = 8
DISTRIBUTION_IDS = 256


def choose_by_softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the argmax, int32 [R], and the softmax probabilities, float32 [R, V], of logits
    [R, V].

    This is the common way to choose a greedy token, measured for comparison with `choose_tokens`.
    """
    probs = torch.softmax(logits, dim=-1, dtype=torch.float32)
    return probs.argmax(dim=-1).to(torch.int32), probs


def state_of(sessions: int, rule: int, device: torch.device) -> SamplingState:
    """Return the sampling state of `sessions` slots with acceptance rule `rule`, followed by the
    padding slot."""
    return SamplingState(
        stream_keys=torch.arange((sessions + 1) * NUM_STREAMS, device=device).view(sessions + 1, -1)
        * 7919
        - 3,
        temperatures=torch.full((sessions + 1,), float(rule != RULE_GREEDY), device=device),
        rules=torch.full((sessions + 1,), rule, dtype=torch.int32, device=device),
    )


def microseconds(call: Callable[[], object]) -> float:
    """Return the median microseconds of one call, measured in a CUDA graph of 16 calls."""
    return round(seconds(lambda _: call(), 16) * 1e6, 2)


def kernels_of(call: Callable[[], object]) -> int:
    """Return the number of kernels that one call launches; 0 if the profiler records no kernels on
    this machine."""
    call()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    return sum(str(event.device_type).endswith("CUDA") for event in profile.events() or [])


def _ints(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device=device)


def check(device: torch.device) -> list[tuple[str, bool]]:
    """Return (name of a check, whether it passed): each one compares a kernel with its PyTorch
    reference."""
    found = []
    slots = _ints(8, device)
    for vocab in (100, 8193, *VOCABULARIES):
        logits = torch.randn(8, vocab, device=device) * 3
        for rule in (RULE_GREEDY, RULE_COUPLED, RULE_REJECTION):
            arguments = (logits, state_of(8, rule, device), slots, slots + 50)
            mine = choose_tokens(*arguments, rows_per_slot=1, side="target")
            twin = choose_tokens_torch(*arguments, rows_per_slot=1, side="target")
            found.append((f"choose_tokens V={vocab} rule={rule}", torch.equal(mine, twin)))
        columns = log_softmax_topk(logits, 8)[1]
        same = torch.equal(columns, log_softmax_topk_torch(logits, 8)[1])
        found.append((f"log_softmax_topk V={vocab}", same))
        found.append((f"softmax + argmax V={vocab}", _softmax_agrees(logits)))
    return found


def _softmax_agrees(logits: Tensor) -> bool:
    greedy = state_of(len(logits), RULE_GREEDY, logits.device)
    slots = _ints(len(logits), logits.device)
    chosen = choose_tokens(logits, greedy, slots, slots, rows_per_slot=1, side="target")
    return torch.equal(chosen, choose_by_softmax(logits)[0])


def time_choices(device: torch.device) -> list[list[object]]:
    """Return a table row for each vocabulary and number of rows:
    [V, rows, and four times in microseconds].

    The times are those of `choose_tokens` with the rules greedy and coupled, of softmax with
    argmax, and of log-softmax with the 8 best candidates.
    """
    result: list[list[object]] = []
    for vocab in VOCABULARIES:
        for rows in ROWS:
            logits = torch.randn(rows, vocab, device=device) * 3
            slots = _ints(rows, device)
            calls: list[Callable[[], object]] = [
                partial(
                    choose_tokens,
                    logits,
                    state_of(rows, rule, device),
                    slots,
                    slots,
                    rows_per_slot=1,
                    side="target",
                )
                for rule in (RULE_GREEDY, RULE_COUPLED)
            ]
            calls += [partial(choose_by_softmax, logits), partial(log_softmax_topk, logits, 8)]
            result.append([vocab, rows, *(microseconds(call) for call in calls)])
    return result


def count_kernels(device: torch.device) -> dict[str, int]:
    """Return the number of kernels of each of the two ways to choose a greedy token, by name."""
    logits, slots = torch.randn(8, VOCAB, device=device), _ints(8, device)
    state = state_of(8, RULE_GREEDY, device)
    return {
        "choose_tokens": kernels_of(
            lambda: choose_tokens(logits, state, slots, slots, rows_per_slot=1, side="target")
        ),
        "softmax + argmax": kernels_of(lambda: choose_by_softmax(logits)),
    }


def sparse_distribution(sessions: int, tokens: Tensor) -> SparseDistribution:
    """Return draft distributions that give the same weight to DISTRIBUTION_IDS ids of each node.
    The first of these ids is the draft token."""
    nodes = sessions * NODES
    drafted = tokens.view(sessions, NODES).roll(-1, dims=1).reshape(nodes, 1)
    ids = (drafted + torch.arange(DISTRIBUTION_IDS, device=tokens.device) * 16).to(torch.int32)
    starts = torch.arange(NODES + 1, device=tokens.device) * DISTRIBUTION_IDS
    firsts = torch.arange(sessions, device=tokens.device)[:, None] * (NODES * DISTRIBUTION_IDS)
    counts = torch.full(
        (nodes * DISTRIBUTION_IDS,), 60_000, dtype=torch.int32, device=tokens.device
    )
    return SparseDistribution.of_offsets(ids.flatten(), counts, (firsts + starts).to(torch.int32))


def dense_distribution(sessions: int, device: torch.device) -> DenseChainDistribution:
    """Return draft distributions of chains that are uniform over every fourth token id."""
    shape = (sessions + 1, NODES - 1, DRAFT_VOCAB)
    columns = torch.full((VOCAB,), -1, dtype=torch.int32, device=device)
    target_ids = _ints(DRAFT_VOCAB, device) * 4
    columns[target_ids.long()] = _ints(DRAFT_VOCAB, device)
    return DenseChainDistribution(
        torch.full(shape, 1.0 / DRAFT_VOCAB, device=device), columns, target_ids
    )


def time_acceptance(device: torch.device) -> list[list[object]]:
    """Return a table row for each number of sessions: the number, and the microseconds of five
    kinds of acceptance.

    These are greedy acceptance of a chain and of a tree, the target-only rule, and the rejection
    rule with sparse and with dense draft distributions.
    """
    result: list[list[object]] = []
    for sessions in (1, 8, 64):
        rows = sessions * NODES
        logits = torch.randn(rows, VOCAB, device=device)
        slots, positions = _ints(sessions, device), _ints(rows, device)
        tokens = torch.randint(0, 4000, (rows,), dtype=torch.int32, device=device) * 4
        chosen = (
            tokens.view(sessions, NODES).roll(-1, dims=1).reshape(-1)
        )  # all drafts are accepted
        parents = (_ints(NODES - 1, device) - 1).repeat(sessions, 1)
        distributions = (
            None,
            sparse_distribution(sessions, tokens),
            dense_distribution(sessions, device),
        )
        rules = (RULE_TARGET_ONLY, RULE_REJECTION, RULE_REJECTION)
        greedy = state_of(sessions, RULE_GREEDY, device)
        row: list[object] = [sessions]
        common: dict[str, Any] = {"num_nodes": NODES, "slots": slots, "positions": positions}
        for tree in (None, parents):
            call = partial(accept_matching, chosen, tokens, tree, state=greedy, **common)
            row.append(microseconds(call))
        for distribution, rule in zip(distributions, rules, strict=True):
            state = state_of(sessions, rule, device)
            drafts = (logits, chosen, tokens, None)
            row.append(
                microseconds(
                    partial(
                        accept_sampled, *drafts, state=state, distribution=distribution, **common
                    )
                )
            )
        result.append(row)
    return result


def main() -> None:
    """Check, measure and print a report. Raises FailedPreconditionError without a CUDA device."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise FailedPreconditionError("the check needs a CUDA device", reason="NO_DEVICE")
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    found = check(device)
    failed = [name for name, good in found if not good]
    print(
        f"{len(found) - len(failed)} of {len(found)} checks agree", *failed, sep="\n  ", flush=True
    )
    choice_names = ("V", "rows", "greedy us", "coupled us", "softmax+argmax us", "top-8 us")
    choices = time_choices(device)
    print(format_table(choice_names, choices), flush=True)
    kernels = count_kernels(device)
    print("kernels of one call:", kernels, flush=True)
    accept_names = ("sessions", "chain us", "tree us", "target-only us", "sparse us", "dense us")
    acceptances = time_acceptance(device)
    print(
        f"\nacceptance, {NODES} nodes a session, V = {VOCAB}, draft law on {DISTRIBUTION_IDS} ids"
    )
    print(format_table(accept_names, acceptances), flush=True)
    if args.out is not None:
        figures = {
            "environment": describe(),
            "device": torch.cuda.get_device_name(device),
            "failed_checks": failed,
            "choices": [dict(zip(choice_names, row, strict=True)) for row in choices],
            "kernels": kernels,
            "acceptance": [dict(zip(accept_names, row, strict=True)) for row in acceptances],
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
