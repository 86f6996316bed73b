"""Sessions of all kinds that a device drafts, or leaves to the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from outrider_drafter.server.draft_engine import DraftEngine

from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.sampling import Rule, SamplingParams
from outrider.wire.messages import Proposal, Verdict, Verdicts
from tests.unit.drafter.helpers import CHAIN, TREE, Script, drain, name_of

COUPLED = SamplingParams(temperature=0.8, seed=2**64 - 9)
TARGET_ONLY = SamplingParams(temperature=0.7, rule=Rule.TARGET_ONLY, seed=6)
REJECTION = SamplingParams(temperature=1.0, rule=Rule.REJECTION, seed=5)
MIX: list[tuple[SpeculationPlan, SamplingParams]] = [
    (CHAIN, SamplingParams()),
    (CHAIN, COUPLED),
    (SpeculationPlan(method=DraftMethod.EAGLE3, draft_tokens=7, top_k=1), TARGET_ONLY),
    (TREE, SamplingParams()),
    (TREE, TARGET_ONLY),
    (TREE, COUPLED),
    (CHAIN, REJECTION),
    (TREE, REJECTION),
    (CHAIN, SamplingParams(temperature=0.8, seed=3, top_p=0.7)),
    (TREE, SamplingParams(temperature=0.6, rule=Rule.TARGET_ONLY, min_p=0.1)),
    (CHAIN, SamplingParams(repetition_penalty=1.3)),
    (CHAIN, SamplingParams(banned_ids=(7, 11))),
    (TREE, SamplingParams(frequency_penalty=1.5, presence_penalty=-0.5)),
    (TREE, SamplingParams(temperature=0.8, seed=4, top_k=9, repetition_penalty=1.6)),
    (CHAIN, SamplingParams(temperature=1.2, seed=8, frequency_penalty=2.0, top_p=0.9)),
    (TREE, SamplingParams(temperature=0.9, seed=2, logit_bias=((5, 4.0), (60, -100.0)))),
]
HOSTED = 1
"""How many of them the device leaves to the host."""


def random_ends(rounds: int, *, seed: int) -> list[list[int]]:
    """What `told` tells the sessions of MIX: a prompt's end, then 1 to 5 tokens a round."""
    rng = np.random.default_rng(seed)
    steps = [rng.integers(5, 25, len(MIX))]
    steps += [rng.integers(1, 6, len(MIX)) for _ in range(rounds - 1)]
    ends: list[list[int]] = np.cumsum(steps, axis=0).tolist()
    return ends


Bring = Callable[[Sequence[Verdict]], Sequence[Verdicts]]
"""What a round says of each session, as messages."""


def apart(entries: Sequence[Verdict]) -> list[Verdicts]:
    """A message of each session."""
    return [Verdicts.of_verdicts([entry]) for entry in entries]


def together(entries: Sequence[Verdict]) -> list[Verdicts]:
    """One of all."""
    return [Verdicts.of_verdicts(entries)]


def told(
    engine: DraftEngine,
    mix: Sequence[tuple[SpeculationPlan, SamplingParams]],
    ends: Sequence[Sequence[int]],
    bring: Bring = apart,
) -> list[dict[str, Proposal]]:
    """Proposals after each round of verdicts, session i being told up to `ends[round][i]`."""
    scripts = [Script(f"s{i}", seed=20 + i) for i in range(len(mix))]
    for script, (plan, sampling) in zip(scripts, mix, strict=True):
        engine.handle_message(1, script.start(plan=plan, sampling=sampling))
    rounds = []
    for round_ends in ends:
        for verdicts in bring([s.entry(end) for s, end in zip(scripts, round_ends, strict=True)]):
            engine.handle_message(1, verdicts)
        rounds.append({name_of(p): p for p in drain(engine)})
    return rounds


def side_by_side(
    found: Sequence[Mapping[str, Proposal]],
    expected: Sequence[Mapping[str, Proposal]],
    sessions: int,
) -> Iterator[tuple[str, Proposal, Proposal]]:
    """Of each round and session its name, its proposal and the other one; every session has one of
    both in every round."""
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys() and len(ours) == sessions
        for name, proposal in ours.items():
            yield name, proposal, theirs[name]
