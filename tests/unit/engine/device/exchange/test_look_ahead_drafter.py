"""Outcomes of a chain are ranked by the summed log-probabilities of their tokens."""

from __future__ import annotations

import math

import torch

from outrider.engine.device.exchange.look_ahead_drafter import rank_outcomes

DRAFTED = torch.tensor([[5, 6]], dtype=torch.int32)
TOKENS = torch.tensor([[[5, 8, 9], [7, 6, 9], [1, 2, -1]]], dtype=torch.int32)
LOGPROBS = torch.tensor([[[-0.5, -1.0, -3.0], [-0.25, -2.0, -4.0], [-0.1, -0.2, -math.inf]]])


def ranked(count: int) -> list[tuple[int, int, bool]]:
    """Places, tokens, and whether they are outcomes, best first."""
    found = rank_outcomes(DRAFTED, TOKENS, LOGPROBS, count=count)
    columns = (found.places[0].tolist(), found.tokens[0].tolist(), found.are_there[0].tolist())
    return list(zip(*columns, strict=True))


def test_the_likeliest_come_first_and_a_drafted_token_is_no_outcome_but_at_the_end() -> None:
    # -.5 - .25, -1, -.5 - 2 - .1, -.5 - 2 - .2, -3, -.5 - 4
    expected = [(1, 7), (0, 8), (2, 1), (2, 2), (0, 9), (1, 9)]
    assert ranked(6) == [(*each, True) for each in expected]


def test_places_without_a_candidate_are_none() -> None:
    assert [are_there for *_, are_there in ranked(9)] == [True] * 6 + [False] * 3


def test_what_follows_a_token_that_is_no_candidate_is_unlikely() -> None:
    tokens = TOKENS.clone()
    tokens[0, 0, 0] = 4
    found = rank_outcomes(DRAFTED, tokens, LOGPROBS, count=4)
    assert found.places[0].tolist() == [0, 0, 0, 1]
