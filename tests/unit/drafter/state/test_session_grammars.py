"""Drafts of sessions in a form: masked once the form is known, as before until then."""

from __future__ import annotations

import re
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from outrider_drafter.gpu import grammar_masks
from outrider_drafter.metrics import DrafterMetrics
from outrider_drafter.proposers.ngram import NgramProposer
from outrider_drafter.proposers.small_model import SmallModelProposer
from outrider_drafter.server.draft_engine import DraftEngine
from outrider_drafter.state import session_grammars
from outrider_drafter.state.session import VerdictLimits

from outrider.engine.model_loader import load_target
from outrider.grammar.constraint import allowed_prefix_len, small_id_set
from outrider.grammar.grammar_cache import CompiledGrammar, GrammarCache
from outrider.spec.digest import EMPTY_DIGEST, extend_digest
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.sampling import Rule, SamplingParams
from outrider.spec.structured_output import StructuredKind, StructuredOutput
from outrider.spec.tree import path
from outrider.text.tokenizer import Tokenizer
from outrider.wire.messages import SessionEnd
from tests.factories import make_eagle3_head
from tests.fakes.scripted_grammar import END, Scripted
from tests.mask_limits import LONG_MASKS
from tests.unit.drafter.device_drafting import on_device
from tests.unit.drafter.helpers import CHAIN, HIDDEN, TREE, Script, answers
from tests.unit.engine.device.draft_sessions import plain_head
from tests.waiting import wait_until

VOCAB, STOP = 384, 2
FORM = StructuredOutput(StructuredKind.REGEX, "(a[0-9]b ){2,5}!")
PLANS = [
    SpeculationPlan(method=DraftMethod.MODEL, draft_tokens=6),
    SpeculationPlan(method=DraftMethod.MODEL, draft_tokens=12, top_k=3, depth=4),
]
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=1.0, draft_key=7),
    SamplingParams(temperature=1.0, draft_key=7, rule=Rule.REJECTION),
    SamplingParams(temperature=1.0, draft_key=0, rule=Rule.TARGET_ONLY, presence_penalty=0.5),
]


@pytest.fixture(scope="module")
def grammars(tiny_target: Path) -> GrammarCache:
    found = GrammarCache.from_tokenizer_file(
        tiny_target / "tokenizer.json", vocab_size=VOCAB, masks=LONG_MASKS
    )
    assert found is not None
    return found


@pytest.fixture(scope="module")
def small(tiny_target: Path) -> SmallModelProposer:
    return SmallModelProposer(load_target(tiny_target, kv_tokens=2048), vocab_size=VOCAB)


def engine_of(
    source: SmallModelProposer | NgramProposer, grammars: GrammarCache | None
) -> DraftEngine:
    limits = VerdictLimits(vocab_size=VOCAB, feature_size=0, max_context=4096)
    return DraftEngine(
        [source], limits=limits, max_sessions=8, metrics=DrafterMetrics(), grammars=grammars
    )


def compiled(engine: DraftEngine) -> None:
    """Wait for the thread that compiles."""
    wait_until(lambda: not engine.is_compiling, what="grammars")


def script_of(tokenizer: Tokenizer, prompt: str, output: str) -> tuple[Script, int]:
    """A session that has emitted so, and the length of its prompt."""
    ids = [tokenizer.encode(prompt), tokenizer.encode(output)]
    script = Script("s")
    script.tokens = np.array([*ids[0], *ids[1]], np.int32)
    return script, len(ids[0])


@pytest.mark.parametrize("plan", PLANS, ids=["chain", "tree"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_every_path_of_a_draft_fits_the_form(
    plan: SpeculationPlan,
    sampling: SamplingParams,
    small: SmallModelProposer,
    grammars: GrammarCache,
    tiny_target: Path,
) -> None:
    tokenizer = Tokenizer.load(tiny_target)
    script, prompt_len = script_of(tokenizer, "Say it.", "a7b a")
    start = replace(
        script.start(plan=plan, sampling=sampling, prompt_len=prompt_len),
        structured_output=FORM,
        stop_token_ids=(STOP,),
    )
    engine = engine_of(small, grammars)
    engine.handle_message(1, start)
    compiled(engine)
    engine.handle_message(1, script.verdict(len(script.tokens), with_features=False))
    (proposal,) = answers(engine)
    tree = proposal.tree
    assert 0 < len(tree) <= plan.draft_tokens
    for node in range(len(tree)):
        tokens = [int(tree.tokens[at]) for at in path(tree.parents, node)]
        # Behind an end nothing can stand, whatever it is.
        said = tokens[: tokens.index(STOP)] if STOP in tokens else tokens
        text = "a7b a" + tokenizer.decode(said)
        longest = "a0b a0b a0b a0b a0b !"
        shape = re.sub("[0-9]", "0", text)
        assert longest.startswith(shape) or re.fullmatch(FORM.text, text), text


def test_lookups_are_cut_where_they_leave_the_form(
    grammars: GrammarCache, tiny_target: Path
) -> None:
    tokenizer = Tokenizer.load(tiny_target)
    script, prompt_len = script_of(tokenizer, "a7b !q a7b !q", "a1b a7b ")
    plan = SpeculationPlan(method=DraftMethod.NGRAM, draft_tokens=6)
    start = script.start(plan=plan, prompt_len=prompt_len)
    found = []
    for form in (None, FORM):
        engine = engine_of(NgramProposer(min_match=1), grammars)
        script.told = script.features_told = 0
        engine.handle_message(1, replace(start, structured_output=form, stop_token_ids=(STOP,)))
        compiled(engine)
        engine.handle_message(1, script.verdict(len(script.tokens), with_features=False))
        (proposal,) = answers(engine)
        found.append(proposal.tree.tokens.tolist())
    free, bound = found
    assert free and len(bound) < len(free) and free[: len(bound)] == bound


@pytest.mark.parametrize("missing", ["library", "form"])
def test_without_a_grammar_drafts_are_what_they_were(
    missing: str, small: SmallModelProposer, grammars: GrammarCache, tiny_target: Path
) -> None:
    """No library, or a form that cannot be compiled: nothing is lost but acceptance."""
    tokenizer = Tokenizer.load(tiny_target)
    script, prompt_len = script_of(tokenizer, "Say it.", "a7b a")
    plan, trees = PLANS[0], []
    for form in (None, FORM if missing == "library" else replace(FORM, text="(")):
        engine = engine_of(small, None if missing == "library" else grammars)
        script.told = script.features_told = 0
        start = script.start(plan=plan, prompt_len=prompt_len)
        engine.handle_message(1, replace(start, structured_output=form, stop_token_ids=(STOP,)))
        compiled(engine)
        engine.handle_message(1, script.verdict(len(script.tokens), with_features=False))
        (proposal,) = answers(engine)
        trees.append(proposal.tree.tokens.tolist())
        engine.handle_message(1, SessionEnd(handle=script.handle))
    assert trees[0] == trees[1]


def test_forms_that_were_compiled_make_room_for_others(
    small: SmallModelProposer, grammars: GrammarCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_grammars, "MAX_WAITING_GRAMMARS", 2)
    engine = engine_of(small, grammars)
    for number in range(5):
        form = StructuredOutput(StructuredKind.REGEX, f"y{{{number + 1}}}")
        start = Script(f"one{number}").start(plan=PLANS[0])
        engine.handle_message(1, replace(start, handle=number, structured_output=form))
        compiled(engine)
        assert grammars.get_cached(form) is not None


def test_few_forms_wait_to_be_compiled(
    small: SmallModelProposer, grammars: GrammarCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_grammars, "MAX_WAITING_GRAMMARS", 2)
    compile_grammar, over = GrammarCache.compile_grammar, threading.Event()
    begun: list[StructuredOutput] = []

    def compile_late(cache: GrammarCache, structured: StructuredOutput) -> CompiledGrammar:
        begun.append(structured)
        assert over.wait(30)
        return compile_grammar(cache, structured)

    monkeypatch.setattr(GrammarCache, "compile_grammar", compile_late)
    engine = engine_of(small, grammars)
    for number in range(5):
        script = Script(f"waiting{number}")
        form = StructuredOutput(StructuredKind.REGEX, f"x{{{number + 1}}}")
        engine.handle_message(1, replace(script.start(plan=PLANS[0]), structured_output=form))
    over.set()
    compiled(engine)
    assert len(begun) == 2


@pytest.mark.parametrize(
    ("drafted", "kept"),
    [
        ([2, 5, 5], [2, 5, 5]),
        ([1, 9, 9, 9], [1, 3, 4]),
        ([9, 9], []),
        ([2, 6, END, 5], [2, 6, END]),
        ([1, 3, 4, 7], [1, 3, 4]),
    ],
    ids=["fits", "forced", "open", "end", "cut"],
)
def test_a_chain_that_was_drafted_without_masks_is_mended(
    drafted: list[int], kept: list[int]
) -> None:
    bound, free = session_in(Scripted()), session_in(None)
    words = np.array([drafted, drafted], dtype=np.int32)
    counts = np.array([len(drafted)] * 2, dtype=np.int64)
    starts = grammar_masks.draft_starts([bound, free])
    found, lengths = grammar_masks.truncate_chains(starts, words, counts)
    assert found[0, : lengths[0]].tolist() == kept
    assert found[1, : lengths[1]].tolist() == words[0].tolist() == drafted
    assert bound.constraint.path == []


def test_what_might_have_been_drafted_stands_in_for_what_does_not_fit() -> None:
    bound = session_in(Scripted())
    words = np.array([[2, 9, 5]], dtype=np.int32)
    others = np.array([[[2, 1], [9, 6], [5, 6]]], dtype=np.int32)
    starts = grammar_masks.draft_starts([bound])
    found, lengths = grammar_masks.truncate_chains(starts, words, np.array([3]), others)
    assert found[0, : lengths[0]].tolist() == [2, 6, END]


def test_drafts_behind_paths_are_masked_and_fit_there_and_nothing_is_behind_wrong_ones() -> None:
    """Several of one session in one launch."""
    bound, paths = session_in(Scripted()), [[1], [2], [7], [2, 5], [2, 6, END]]
    starts = grammar_masks.draft_starts([bound] * 5, paths)
    masks = grammar_masks.first_level_masks(starts, 3)
    assert [None if m is None else [small_id_set(one, 9) for one in m] for m in masks] == [
        [[3], [4], [5, 6]],
        [[5, 6]],
        None,
        [[5, 6]],
        None,
    ]
    words = np.array([[9, 9], [5, 5], [5, 5], [9, 5], [5, 5]], dtype=np.int32)
    found, lengths = grammar_masks.truncate_chains(starts, words, np.array([2] * 5))
    assert [row[:n].tolist() for row, n in zip(found, lengths, strict=True)] == [
        [3, 4],
        [5, 5],
        [],
        [],
        [],
    ]
    assert bound.constraint.path == []


def session_in(constraint: Scripted | None) -> Any:
    tokens = SimpleNamespace(view=np.empty(0, dtype=np.int32))
    bound = constraint is not None
    return SimpleNamespace(
        constraint=constraint, has_constraint=bound, slot=int(bound), tokens=tokens, prompt_len=0
    )


@pytest.mark.parametrize(
    ("plan", "sampling"),
    # Trees of the rejection rule are the host's, in a form or not.
    [(CHAIN, sampling) for sampling in SAMPLINGS] + [(TREE, SAMPLINGS[0]), (TREE, SAMPLINGS[1])],
)
def test_a_device_drafts_for_sessions_in_a_form_as_for_others(
    plan: SpeculationPlan,
    sampling: SamplingParams,
    grammars: GrammarCache,
    tiny_target: Path,
    tmp_path: Path,
) -> None:
    """In the launch of all; what comes of a chain that is no draw from a distribution fits the
    form."""
    make_eagle3_head(tmp_path)
    source = on_device(plain_head(tmp_path))
    limits = VerdictLimits(vocab_size=VOCAB, feature_size=HIDDEN, max_context=4096)
    engine = DraftEngine(
        [source], limits=limits, max_sessions=8, metrics=DrafterMetrics(), grammars=grammars
    )
    tokenizer = Tokenizer.load(tiny_target)
    script = Script("bound", length=64)
    output = np.array(tokenizer.encode("a7b "), np.int32)
    script.tokens[-len(output) :] = output
    start = replace(
        script.start(plan=plan, sampling=sampling, prompt_len=64 - len(output)),
        structured_output=FORM,
        stop_token_ids=(STOP,),
    )
    engine.handle_message(1, start)
    compiled(engine)
    engine.handle_message(1, script.verdict(64))
    (proposal,) = answers(engine)
    assert source.num_on_host == 0
    if plan is CHAIN and sampling.effective_rule is not Rule.REJECTION:
        # Its first token may only be "a".
        tokens = proposal.tree.tokens.tolist()
        assert tokens and tokenizer.decode(tokens[:1]) == "a"
    else:
        assert len(proposal.tree)


def outcomes_of(drafted: list[int], tokens: NDArray[np.int32]) -> dict[int, list[int]]:
    """Every outcome of a chain behind these tokens, by its digest."""
    digest, found = extend_digest(EMPTY_DIGEST, tokens), dict[int, list[int]]()
    for depth in range(len(drafted) + 1):
        here = extend_digest(digest, drafted[:depth])
        for token in range(VOCAB):
            found[extend_digest(here, [token])] = [*drafted[:depth], token]
    return found


@pytest.mark.parametrize("sampling", [SAMPLINGS[0], SAMPLINGS[1]])
def test_a_device_looks_ahead_within_a_form(
    sampling: SamplingParams, grammars: GrammarCache, tiny_target: Path, tmp_path: Path
) -> None:
    """Only outcomes that the form allows, and behind them what may stand there; of a session
    without a form in the same launches, all as ever."""
    make_eagle3_head(tmp_path)
    source = on_device(plain_head(tmp_path))
    limits = VerdictLimits(vocab_size=VOCAB, feature_size=HIDDEN, max_context=4096)
    engine = DraftEngine(
        [source], limits=limits, max_sessions=8, metrics=DrafterMetrics(), grammars=grammars
    )
    tokenizer = Tokenizer.load(tiny_target)
    output = np.array(tokenizer.encode("a7b a"), np.int32)
    scripts = [Script("bound", length=64), Script("free", length=64)]
    plan = replace(CHAIN, look_ahead=1)
    for script, form in zip(scripts, (FORM, None), strict=True):
        script.tokens[-len(output) :] = output
        start = script.start(plan=plan, sampling=sampling, prompt_len=64 - len(output))
        engine.handle_message(1, replace(start, structured_output=form, stop_token_ids=(STOP,)))
    compiled(engine)
    for script in scripts:
        engine.handle_message(1, script.verdict(64))
    live = {answer.handle: answer.tree.tokens.tolist() for answer in answers(engine)}
    constraint = grammars.compile_grammar(FORM).start_constraint([STOP])
    constraint.advance_to(output)
    outcomes = outcomes_of(live[scripts[0].handle], scripts[0].tokens[:64])
    ahead: Counter[int] = Counter()
    for together in engine.run_look_ahead():
        for _, message in together:
            for entry in message.iter_proposals():
                ahead[entry.handle] += 1
                if entry.handle == scripts[0].handle:
                    path = outcomes[entry.prefix_digest]
                    drafted = [*path, *entry.tree.tokens.tolist()]
                    assert allowed_prefix_len(constraint, drafted) == len(drafted)
                    assert len(entry.tree)
    # One of ten digits, and behind the chain "a" or "!"; the digit that was drafted is no outcome.
    assert ahead[scripts[0].handle] == 11 < ahead[scripts[1].handle]
