"""A head in the verifier's process drafts for sessions in a grammar: one text, legal drafts."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from outrider_verifier.engine.outbox import Outbox
from outrider_verifier.model_runner.cpu_runner import CpuModelRunner
from outrider_verifier.model_runner.gpu_runner import grammar_drafts
from outrider_verifier.model_runner.gpu_runner.runner import GpuModelRunner
from outrider_verifier.state.effects import EventBatch

from outrider.engine.device.drafting.draft_masks import Masks
from outrider.engine.device.drafting.grammar_drafts import GrammarDraftBuffer
from outrider.engine.device.graphs.shapes import DraftKind
from outrider.engine.device.round_launcher import LaunchedRound, RoundLauncher
from outrider.engine.kernels.attention.layout import PADDING_NODE
from outrider.grammar.constraint import is_allowed
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.sampling import Rule, SamplingParams
from outrider.spec.structured_output import StructuredKind, StructuredOutput
from outrider.text.tokenizer import Tokenizer
from outrider.wire.messages import SpecStats
from tests.unit.verifier.device_serving import OWN, SAMPLINGS, run_all, serving
from tests.unit.verifier.forced_preemption import preempt_often, preemptions
from tests.unit.verifier.server.test_structured_output import FORM, SPEC, run_one, texts_of

TREE_NODES = 6
Results = list[tuple[list[int], SpecStats]]


def plan_of(topk: int) -> tuple[SpeculationPlan, dict[str, Any]]:
    """A chain, or a tree, and the verifier's settings for it."""
    if topk == 1:
        return OWN, {}
    plan = SpeculationPlan(method=DraftMethod.EAGLE3, draft_tokens=TREE_NODES)
    return plan, {"draft_length": TREE_NODES, "draft_top_k": topk}


def texts_by_sampling(target: Path, *names: str) -> dict[str, list[list[int]]]:
    """Plain text in the form, by sampling, from the host's engine."""

    async def collect() -> dict[str, list[list[int]]]:
        async with serving(target, device=None) as service:
            return {
                name: texts_of(await run_all(service, SpeculationPlan(), SAMPLINGS[name], **SPEC))
                for name in names
            }

    return asyncio.run(collect())


@pytest.fixture(scope="module")
def texts(tiny_target: Path) -> dict[str, list[list[int]]]:
    return texts_by_sampling(tiny_target, "greedy", "coupled")


def accepted(results: Results) -> int:
    return sum(stats.accepted for _, stats in results)


@pytest.mark.parametrize(
    ("placement", "topk", "name"),
    [("fused", 1, "coupled"), ("colocated", 1, "greedy"), ("fused", 3, "coupled")],
)
async def test_own_drafts_change_no_text_and_stand(
    name: str,
    placement: str,
    topk: int,
    tiny_target: Path,
    tiny_head: Path,
    texts: dict[str, list[list[int]]],
) -> None:
    plan, settings = plan_of(topk)
    async with serving(tiny_target, tiny_head, placement=placement, **settings) as service:
        results = await run_all(service, plan, SAMPLINGS[name], **SPEC)
    assert texts_of(results) == texts[name]
    assert all(stats.proposed > 0 for _, stats in results)
    # Of a random head over 384 ids; what a form leaves open is little.
    assert accepted(results) > 0


@pytest.mark.parametrize(("rule", "topk"), [(Rule.REJECTION, 1), (Rule.TARGET_ONLY, 3)])
async def test_rules_that_toss_coins_stay_in_the_grammar(
    rule: Rule, topk: int, tiny_target: Path, tiny_head: Path
) -> None:
    tokenizer, (plan, settings) = Tokenizer.load(tiny_target), plan_of(topk)
    sampling = SamplingParams(temperature=1.2, rule=rule, seed=3)
    async with serving(tiny_target, tiny_head, placement="fused", **settings) as service:
        results = await run_all(service, plan, sampling, **SPEC)
    for tokens, stats in results:
        assert re.fullmatch(FORM.text, tokenizer.decode(tokens[:-1]))
        assert stats.proposed > 0
    assert accepted(results) > 0


@pytest.mark.parametrize("topk", [1, 3], ids=["chain", "tree"])
async def test_draws_beside_drafts_that_all_fit_stay_in_the_grammar(
    topk: int, tiny_target: Path, tiny_head: Path
) -> None:
    """What the others' form leaves open is nothing, so that the head is told of one alone."""
    tokenizer, (plan, settings) = Tokenizer.load(tiny_target), plan_of(topk)
    forced = StructuredOutput(StructuredKind.REGEX, "(abcdefgh){6}")
    sampling = SamplingParams(temperature=1.2, rule=Rule.REJECTION, seed=3)
    free = {**SPEC, "structured_output": StructuredOutput(StructuredKind.REGEX, "[a-z0-9 ]{20,30}")}
    async with serving(tiny_target, tiny_head, placement="fused", **settings) as service:
        (drawn, _), *others = await asyncio.gather(
            run_one(service, "drawn", plan, sampling, **free),
            *(
                run_one(
                    service,
                    f"s{n}",
                    plan,
                    SamplingParams(),
                    **{**SPEC, "structured_output": forced},
                )
                for n in range(4)
            ),
        )
    assert re.fullmatch("[a-z0-9 ]{20,30}", tokenizer.decode(drawn[:-1]))
    for tokens, _ in others:
        assert re.fullmatch(forced.text, tokenizer.decode(tokens[:-1]))


@pytest.mark.parametrize(
    ("placement", "topk", "rule"),
    [("fused", 1, Rule.COUPLED), ("colocated", 1, Rule.REJECTION), ("fused", 3, Rule.COUPLED)],
)
async def test_drafts_that_a_round_leaves_out_are_those_that_it_would_have_made(
    placement: str,
    topk: int,
    rule: Rule,
    tiny_target: Path,
    tiny_head: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Drafted again, or for the first time once the host knows what stands: the head has seen the
    same."""
    sampling, (plan, settings) = SamplingParams(temperature=0.9, seed=4, rule=rule), plan_of(topk)
    launched: list[bool] = []
    launch = RoundLauncher.launch_round

    def noted(rounds: RoundLauncher, *args: Any, **kwargs: Any) -> LaunchedRound:
        found = launch(rounds, *args, **kwargs)
        if kwargs["drafts"] is DraftKind.IN_PROCESS:
            launched.append(found.is_undrafted)
        return found

    async def run() -> Results:
        launched.clear()
        async with serving(tiny_target, tiny_head, placement=placement, **settings) as service:
            return [await run_one(service, "alone", plan, sampling, **SPEC)]

    monkeypatch.setattr(RoundLauncher, "launch_round", noted)
    late = await run()
    assert launched and all(launched)
    monkeypatch.setattr(
        "outrider_verifier.model_runner.gpu_runner.runner.can_skip_drafts", lambda group: False
    )
    at_once = await run()
    assert launched and not any(launched)
    assert texts_of(late) == texts_of(at_once)
    assert [s.accepted for _, s in late] == [s.accepted for _, s in at_once]
    assert [s.proposed for _, s in late] == [s.proposed for _, s in at_once]


class Levels:
    """Chains that rounds drafted, drafted again level by level, under no masks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.same = list[bool]()
        """Whether tokens are, chain by chain,"""
        self.apart = list[float]()
        """and how far probabilities are from each other where they are."""
        begin = GrammarDraftBuffer.start_drafts

        def again(
            drafts: GrammarDraftBuffer,
            slots: Sequence[int],
            allowed_tokens: Sequence[Masks | None],
            *,
            seen: bool,
        ) -> None:
            assert not seen
            head, rows = drafts.drafter, list(slots)
            assert head.distribution is not None
            tokens, distributions = head.tokens[rows].clone(), head.distribution.probs[rows].clone()
            begin(drafts, slots, [None] * len(rows))
            for level in range(1, drafts.length):
                drafts.choose_level(slots, level, [None] * len(rows))
            same = (head.tokens[rows] == tokens).all(dim=1)
            self.same += same.tolist()
            self.apart.append(
                float((head.distribution.probs[rows] - distributions)[same].abs().max())
            )
            begin(drafts, slots, allowed_tokens)

        monkeypatch.setattr(GrammarDraftBuffer, "start_drafts", again)
        monkeypatch.setattr(
            "outrider_verifier.model_runner.gpu_runner.runner.can_skip_drafts",
            lambda group: False,
        )


@pytest.mark.parametrize("name", ["coupled", "penalties", "rejection"])
async def test_levels_under_no_masks_are_the_chain_that_a_round_drafts(
    name: str, tiny_target: Path, tiny_head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rejection = SamplingParams(temperature=0.9, seed=4, rule=Rule.REJECTION)
    sampling = rejection if name == "rejection" else SAMPLINGS[name]
    levels = Levels(monkeypatch)
    async with serving(tiny_target, tiny_head, placement="fused") as service:
        await run_all(service, OWN, sampling, **SPEC)
    assert len(levels.same) > 20 and all(levels.same)
    assert max(levels.apart) < 1e-5


async def test_beside_others_each_has_its_own_text(
    tiny_target: Path, tiny_head: Path, texts: dict[str, list[list[int]]]
) -> None:
    async with serving(tiny_target, tiny_head, placement="fused") as service:
        alone = await run_one(service, "alone", OWN, SAMPLINGS["coupled"])
        free, bound = await asyncio.gather(
            run_one(service, "free", OWN, SAMPLINGS["coupled"]),
            run_one(service, "bound", OWN, SAMPLINGS["coupled"], **SPEC),
        )
    assert bound[0] == texts["coupled"][0] and free[0] == alone[0]
    assert bound[1].proposed > 0 and free[1].accepted == alone[1].accepted


async def test_preempted_sessions_draft_on(
    tiny_target: Path, tiny_head: Path, texts: dict[str, list[list[int]]]
) -> None:
    async with serving(tiny_target, tiny_head, placement="fused", preemption="swap") as service:
        preempt_often(service)
        results = await run_all(service, OWN, SAMPLINGS["coupled"], **SPEC)
        assert preemptions(service) >= 6
    assert texts_of(results) == texts["coupled"]


@pytest.mark.parametrize("placement", ["fused", None])
async def test_the_next_round_is_submitted_before_tokens_are_handed_out(
    placement: str | None, tiny_target: Path, tiny_head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rounds do not overlap, on a device; a host's rounds keep the thread until they end."""
    order: list[str] = []

    def noted(name: str, owner: Any, method: str) -> None:
        inner = getattr(owner, method)

        def spy(*args: Any, **kwargs: Any) -> Any:
            order.append(name)
            return inner(*args, **kwargs)

        monkeypatch.setattr(owner, method, spy)

    add, flush, has_events = Outbox.pending_events, Outbox.flush, False

    def adding(outbox: Outbox) -> EventBatch:
        nonlocal has_events
        has_events = True
        return add(outbox)

    def telling(outbox: Outbox) -> bool:
        nonlocal has_events
        if has_events:
            order.append("tell")
        has_events = False
        return flush(outbox)

    monkeypatch.setattr(Outbox, "pending_events", adding)
    monkeypatch.setattr(Outbox, "flush", telling)
    on_device = placement is not None
    runner = GpuModelRunner if on_device else CpuModelRunner
    noted("submit", runner, "submit_round")
    noted("collect", runner, "collect_round")
    where: dict[str, Any] = {"placement": placement} if on_device else {"device": None}
    async with serving(tiny_target, tiny_head if on_device else None, **where) as service:
        plan = OWN if on_device else SpeculationPlan()
        tokens, _ = await run_one(service, "alone", plan, SAMPLINGS["greedy"], **SPEC)
    assert len(tokens) > 4 and order[0] == "submit" and order[-2:] == ["collect", "tell"]
    wanted = ["submit", "tell"] if on_device else ["tell", "submit"]
    # A prompt's first pieces emit nothing; for a first token nothing else is done before.
    first = order.index("tell")
    assert order[first - 1] == "collect"
    order = order[first:]
    between = [order[n + 1 : n + 3] for n, what in enumerate(order[:-2]) if what == "collect"]
    assert len(between) > 3 and all(pair == wanted for pair in between), order


class Seen:
    """What was drafted and what was legal there, round by round."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.first, self.nodes = list[bool](), list[bool]()
        follow = grammar_drafts.apply_grammars

        def spy(group: Any, drafts: GrammarDraftBuffer | None) -> None:
            follow(group, drafts)
            if (
                drafts is not None
                and group.has_in_process_drafts
                and group.inputs.allowed_tokens is not None
            ):
                head = drafts.drafter
                tokens = head.first_tokens.numpy()
                trees = head.parents_of(1 + drafts.length)
                chain = np.arange(-1, drafts.length - 1, dtype=np.int32)
                for number, masks in enumerate(group.inputs.allowed_tokens):
                    if masks is not None and number not in group.undrafted_rows:
                        slot = group.device_slots[number].slot
                        parents = chain if trees is None else trees.numpy()[slot]
                        self._note(tokens[slot], parents, masks)

        monkeypatch.setattr("outrider_verifier.model_runner.gpu_runner.runner.apply_grammars", spy)

    def _note(
        self, tokens: NDArray[np.int32], parents: NDArray[np.int32], masks: NDArray[np.uint32]
    ) -> None:
        assert len(masks) == 1 + len(tokens)
        for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True):
            if parent != PADDING_NODE and token >= 0:
                allowed_tokens = is_allowed(masks[parent + 1], token)
                self.nodes.append(allowed_tokens)
                if parent < 0:
                    self.first.append(allowed_tokens)


@pytest.mark.parametrize(("rule", "topk"), [("coupled", 1), ("rejection", 1), ("coupled", 3)])
async def test_what_is_drafted_is_legal(
    rule: str, topk: int, tiny_target: Path, tiny_head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Seen(monkeypatch)
    sampling = SamplingParams(temperature=0.9, seed=4, rule=Rule(rule))
    plan, settings = plan_of(topk)
    async with serving(tiny_target, tiny_head, placement="fused", **settings) as service:
        await run_all(service, plan, sampling, **SPEC)
    # Where the head's vocabulary has nothing that may follow, it drafts what it likes.
    assert sum(seen.first) > 0.9 * len(seen.first) > 20
    if topk == 1:
        assert sum(seen.nodes) > 0.9 * len(seen.nodes)
    if rule == "coupled" and topk == 1:
        assert all(seen.nodes)
