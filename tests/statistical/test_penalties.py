"""Penalties and biases in rounds: every token follows the target's distribution given all before
it.

A penalised distribution changes with each token of the round, so the second token is checked given
the first: under whatever drafts, its distribution is the target's after that token.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from outrider.engine.acceptance import accept_drafts
from outrider.engine.device.slots.logits_slots import LogitsSlots
from outrider.engine.kernels.acceptance.randomized import accept_sampled
from outrider.engine.kernels.logits_processor.draft_path import OutputPath
from outrider.engine.kernels.logits_processor.process import process_logits
from outrider.engine.kernels.sampling import choose_tokens
from outrider.spec.sampling import Rule, SamplingParams
from tests.reference.acceptance_oracle import warped_probs
from tests.reference.device_rounds import device_law, device_round
from tests.reference.goodness_of_fit import LIMIT, chi_square_excess
from tests.reference.host_rounds import accept_rows, draft, seeded

TRIALS, BATCH, POSITION = 3_000, 1_000, 9
PROMPT, OUTPUT = (0, 0), (1, 1)
TARGET = torch.tensor([[0.9, 1.4, 0.2, 0.8, 1.1], [1.2, 0.1, 0.9, 0.6, 1.0], [0.0] * 5])
DRAFT = torch.tensor([[0.2, 0.4, 0.6, 1.5, 1.9], [0.0, 1.3, 0.4, 1.1, 0.2]])
PARAMS = {
    "repetition": SamplingParams(temperature=0.8, repetition_penalty=4.0),
    "counted": SamplingParams(temperature=0.9, frequency_penalty=1.2, presence_penalty=0.8),
    "biased": SamplingParams(
        temperature=1.1, frequency_penalty=-1.1, logit_bias=((2, 1.3),), banned_ids=(4,), top_k=3
    ),
}
RULES = (Rule.COUPLED, Rule.REJECTION, Rule.TARGET_ONLY)


def _rounds(base: SamplingParams, first: int, *, on_device: bool) -> list[tuple[int, ...]]:
    """What BATCH sessions, which differ in their seeds, emit in one round."""
    params, positions = seeded(base, BATCH, first), [POSITION] * BATCH
    drafts = draft(
        lambda context: DRAFT[context.shape[1]].repeat(len(context), 1), params, positions, [1, 1]
    )
    logits = TARGET.repeat(BATCH, 1)
    if not on_device:
        history = {
            "prompt_ids": np.array(PROMPT, np.int32),
            "output_ids": np.array(OUTPUT, np.int32),
        }
        rows = accept_rows(drafts, params, positions, stride=3)
        return [r.tokens for r in accept_drafts(logits, [replace(row, **history) for row in rows])]
    here = device_round(drafts, params, positions)
    held = LogitsSlots(BATCH + 1, TARGET.shape[1], torch.device("cpu"))
    for slot in range(BATCH):
        held.begin_session(slot, base, prompt_ids=PROMPT, output_ids=OUTPUT)
    sessions = (here.state, here.slots, here.positions)
    path = OutputPath(here.tokens.view(BATCH, 3)[:, 1:])
    process_logits(logits, held.state, *sessions, rows_per_slot=3, path=path)
    chosen = choose_tokens(logits, *sessions, rows_per_slot=3, side="target")
    distributions = device_law([drafts.law(row) for row in range(BATCH)], 3)
    result = accept_sampled(
        logits,
        chosen,
        here.tokens,
        here.parents,
        num_nodes=3,
        state=here.state,
        slots=here.slots,
        positions=here.positions,
        distribution=distributions if base.rule is Rule.REJECTION else None,
    )
    counts = result.counts.tolist()
    return [tuple(row[:n]) for row, n in zip(result.tokens.tolist(), counts, strict=True)]


def _law(base: SamplingParams, place: int, output: tuple[int, ...]) -> NDArray[np.float64]:
    logits = TARGET[place].double().numpy()
    return warped_probs(logits, base, prompt=PROMPT, output=output)


@pytest.mark.parametrize(
    ("name", "rule", "on_device"),
    [
        ("repetition", Rule.REJECTION, True),
        ("counted", Rule.TARGET_ONLY, True),
        ("counted", Rule.COUPLED, True),
        ("biased", Rule.REJECTION, True),
        *(("counted", rule, False) for rule in RULES),
    ],
)
def test_each_token_follows_the_law_given_those_before_it(
    name: str, rule: Rule, on_device: bool
) -> None:
    base = replace(PARAMS[name], rule=rule)
    counts = np.zeros((TARGET.shape[1], TARGET.shape[1] + 1), dtype=np.int64)
    for first in range(0, TRIALS, BATCH):
        for tokens in _rounds(base, first, on_device=on_device):
            counts[tokens[0], tokens[1] if len(tokens) > 1 else -1] += 1
    assert chi_square_excess(counts.sum(axis=1), _law(base, 0, OUTPUT)) < LIMIT
    enough = [token for token in range(TARGET.shape[1]) if counts[token, :-1].sum() >= 250]
    after = {token: counts[token, :-1] for token in enough}
    for token, observed in after.items():
        expected = _law(base, 1, (*OUTPUT, token))
        assert chi_square_excess(observed, expected) < LIMIT, f"after {token}"
    # The power of this: a distribution that does not count the first token would be noticed.
    stale = _law(base, 1, OUTPUT)
    assert max(chi_square_excess(observed, stale) for observed in after.values()) > LIMIT
