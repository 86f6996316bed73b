"""Thinking budgets: so many tokens of reasoning, then the close tag, then a free answer."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import InvalidRequestError
from outrider.grammar.constraint import Constraint, allowed_mask, is_allowed, masks_of_paths
from outrider.grammar.draft_masks import ConstrainedTree, masks_of_trees
from outrider.grammar.grammar_cache import GrammarCache
from outrider.grammar.thinking_limit import ThinkingLimit
from outrider.grammar.token_constraint import make_constraint
from outrider.grammar.tool_calls import (
    ThinkTags,
    ToolSchema,
    tool_call_grammar,
    wrap_structured_output,
)
from outrider.spec.structured_output import StructuredKind, StructuredOutput
from outrider.spec.thinking_budget import MAX_THINKING_TOKENS, ThinkingBudget
from outrider.spec.token_limits import TokenLimits
from outrider.spec.tree import ROOT, path
from outrider.text.output_parsers.reasoning_span import TaggedSpan
from outrider.text.tokenizer import Tokenizer
from tests.mask_limits import LONG_MASKS
from tests.reference.grammar_oracle import ids_of

PIECES = [
    *(b"", b"a", b" ", b"\n", b"<", b"</", b"think", b">", b"<think>", b"</think>"),
    *(b">\n", b".</", b"</th", b"ink>", b"<think>\nHm", b"<think>a</think>b", b"\xc3", b"\xa9"),
]
VOCAB = len(PIECES)
EMPTY, A, SPACE, LINE, LESS, CLOSE, THINK, MORE, OPEN_TAG, CLOSE_TAG = range(10)
MORE_LINE, DOT_CLOSE, CLOSE_TH, INK_MORE, OPEN_LINE, WHOLE = range(10, 16)
ONE, SEVERAL = (CLOSE_TAG,), (CLOSE, THINK, MORE)
TAG_IDS = pytest.mark.parametrize("close_ids", [ONE, SEVERAL], ids=["one id", "several ids"])


def token_bytes(token: int) -> bytes:
    """Bytes of an id; the tags with one id are special tokens, which have none."""
    return b"" if token in (OPEN_TAG, CLOSE_TAG) or not 0 <= token < VOCAB else PIECES[token]


def budget(
    max_tokens: int, close_ids: tuple[int, ...] = SEVERAL, *, is_open: bool = True
) -> ThinkingBudget:
    open_ids = (OPEN_TAG,) if close_ids == ONE else (LESS, THINK, MORE)
    return ThinkingBudget(
        max_tokens=max_tokens,
        open_tag="" if is_open else "<think>",
        open_ids=() if is_open else open_ids,
        close_tag="</think>",
        close_ids=close_ids,
    )


def constraint_of(limit: ThinkingBudget, limits: TokenLimits | None = None) -> Constraint:
    made = make_constraint(
        limits, None, vocab_size=VOCAB, thinking=ThinkingLimit(limit, token_bytes)
    )
    assert made is not None
    return made


def allowed_behind(limit: ThinkingBudget, *said: int) -> set[int]:
    constraint = constraint_of(limit)
    constraint.advance_to(np.array(said, dtype=np.int32))
    return ids_of(allowed_mask(constraint), VOCAB)


def emit(limit: ThinkingBudget, wishes: Sequence[int]) -> list[int]:
    """The output of a model that would emit `wishes`, one after another, if it were free."""
    output: list[int] = []
    constraint = constraint_of(limit)
    for wish in wishes:
        constraint.advance_to(np.array(output, dtype=np.int32))
        mask = allowed_mask(constraint)
        output.append(wish if is_allowed(mask, wish) else min(ids_of(mask, VOCAB)))
    return output


FREE = set(range(VOCAB))


@TAG_IDS
@pytest.mark.parametrize("count", [0, 1, 5])
def test_so_many_tokens_come_before_the_close_tag(count: int, close_ids: tuple[int, ...]) -> None:
    output = emit(budget(count, close_ids), [A] * 20)
    assert output == [A] * count + [*close_ids] + [A] * (20 - count - len(close_ids))
    assert allowed_behind(budget(count, close_ids), *output[:-1]) == FREE


@TAG_IDS
def test_tokens_count_from_the_open_tag_on(close_ids: tuple[int, ...]) -> None:
    for opening in (
        ([OPEN_TAG], [LINE, SPACE, OPEN_TAG])
        if close_ids == ONE
        else (
            [LESS, THINK, MORE],
            [LINE, LESS, THINK, MORE_LINE],
            [OPEN_LINE],
        )
    ):
        output = emit(budget(2, close_ids, is_open=False), [*opening, *[A] * 9])
        assert output[: len(opening) + 2 + len(close_ids)] == [*opening, A, A, *close_ids]


def test_answers_without_reasoning_are_free() -> None:
    for said in ([A], [SPACE, A, LESS, THINK, MORE], [LESS, A], [LESS, THINK, A], [EMPTY, A]):
        output = emit(budget(0, is_open=False), [*said, *[A] * 5])
        assert output == [*said, *[A] * 5]


@pytest.mark.parametrize(
    "close",
    [SEVERAL, (CLOSE_TAG,), (DOT_CLOSE, THINK, MORE_LINE), (CLOSE_TH, INK_MORE), (LESS, CLOSE_TAG)],
)
def test_reasoning_that_ends_earlier_is_left_alone(close: tuple[int, ...]) -> None:
    """In whatever tokens the model writes the tag, and if it writes it again."""
    limit = budget(9, ONE)
    wishes = [A, A, *close, A, *[A] * 20, LESS, THINK, MORE, *[A] * 20]
    assert emit(limit, wishes) == wishes


def test_reasoning_may_begin_and_end_within_a_token() -> None:
    assert emit(budget(0, is_open=False), [WHOLE, A, A]) == [WHOLE, A, A]


def test_a_close_tag_that_has_begun_is_completed() -> None:
    assert emit(budget(2), [A, CLOSE, A, A, A]) == [A, CLOSE, THINK, MORE, A]
    assert emit(budget(2), [CLOSE, THINK, A, A]) == [CLOSE, THINK, MORE, A]
    assert emit(budget(2), [A, DOT_CLOSE, A, A, A]) == [A, DOT_CLOSE, THINK, MORE, A]
    # No forced id goes on behind this beginning, so the tag is written anew.
    assert emit(budget(2), [A, CLOSE_TH, A, A, A, A]) == [A, CLOSE_TH, *SEVERAL, A]


def test_white_space_that_a_tokenizer_puts_before_a_tag_is_not_forced() -> None:
    assert emit(budget(1, (SPACE, *SEVERAL)), [A] * 6) == [A, *SEVERAL, A, A]


def test_ids_that_do_not_write_the_tag_are_refused() -> None:
    for ids in ((CLOSE, THINK), (A, SPACE)):
        with pytest.raises(InvalidRequestError, match="do not write '</think>'"):
            constraint_of(budget(1, ids))


def test_the_close_tag_is_forced_even_if_limits_exclude_it() -> None:
    limits = TokenLimits(allowed_ids=(A, SPACE), bad_words=((A, A), (THINK, MORE)))
    constraint, output = constraint_of(budget(2), limits), list[int]()
    for _ in range(8):
        constraint.advance_to(np.array(output, dtype=np.int32))
        output.append(min(ids_of(allowed_mask(constraint), VOCAB)))
    assert output == [A, SPACE, *SEVERAL, A, SPACE, A]


@pytest.mark.parametrize(
    "values",
    [
        {"max_tokens": -1},
        {"max_tokens": MAX_THINKING_TOKENS + 1},
        {"close_tag": ""},
        {"close_ids": ()},
        {"close_ids": (-1,)},
        {"close_ids": (1,) * 65},
        {"open_tag": "<think>"},
        {"close_tag": "x" * 257},
    ],
)
def test_values_out_of_bounds_are_refused(values: dict[str, Any]) -> None:
    good: dict[str, Any] = {"max_tokens": 1, "close_tag": "</think>", "close_ids": (1,)}
    with pytest.raises(InvalidRequestError):
        ThinkingBudget(**(good | values))


# --- The definition, from the whole text ---


def legal_by_hand(limit: ThinkingBudget, said: Sequence[int]) -> set[int]:
    """What may follow, computed anew from all tokens with the router's own span of reasoning."""
    span = TaggedSpan(limit.open_tag, limit.close_tag, is_open=not limit.open_tag)
    num_tokens, was_open, text = 0, not limit.open_tag, ""
    for token in said:
        tags = {limit.open_ids: "<think>", limit.close_ids: "</think>"}
        piece = tags.get((token,), token_bytes(token).decode())
        span.push_text(piece)
        text += piece
        num_tokens += was_open
        was_open = was_open or span.is_reasoning
    if not span.is_reasoning or num_tokens < limit.max_tokens:
        return FREE
    if limit.close_ids == ONE:
        return {CLOSE_TAG}
    written = next((part for part in ("</think", "</") if text.endswith(part)), "")
    return {{"</think": MORE, "</": THINK, "": CLOSE}[written]}


# Without the halves of a character, which are no text alone.
OUTPUTS = st.lists(st.integers(0, VOCAB - 3), max_size=8)
BUDGETS = st.builds(
    budget,
    st.integers(0, 4),
    st.sampled_from([ONE, SEVERAL]),
    is_open=st.booleans(),
)


def followed(limit: ThinkingBudget, wishes: Sequence[int]) -> list[int]:
    """An output that the definition allows."""
    output: list[int] = []
    for wish in wishes:
        legal = legal_by_hand(limit, output)
        output.append(wish if wish in legal else min(legal))
    return output


@given(
    limit=BUDGETS,
    wishes=OUTPUTS,
    tree=st.lists(st.tuples(st.integers(0, VOCAB - 3), st.integers(0, 20)), max_size=8),
    steps=st.integers(1, 3),
)
def test_masks_of_a_tree_are_those_of_the_definition(
    limit: ThinkingBudget, wishes: list[int], tree: list[tuple[int, int]], steps: int
) -> None:
    constraint, output = constraint_of(limit), followed(limit, wishes)
    for seen in range(0, len(output), steps):
        constraint.advance_to(np.array(output[:seen], dtype=np.int32))
    constraint.advance_to(np.array(output, dtype=np.int32))
    tokens = np.array([token for token, _ in tree], dtype=np.int32)
    parents = np.array([at % (n + 1) - 1 for n, (_, at) in enumerate(tree)], dtype=np.int32)
    (masks,) = masks_of_trees([ConstrainedTree(constraint, tokens, parents)])
    for mask, node in zip(masks, range(ROOT, len(tree)), strict=True):
        said = [int(tokens[at]) for at in path(parents, node)]
        legal = [
            token in legal_by_hand(limit, [*output, *said[:n]]) for n, token in enumerate(said)
        ]
        # Behind a token that is not allowed nothing is said.
        if all(legal):
            (alone,) = masks_of_paths(constraint, [said])
            wanted = legal_by_hand(limit, [*output, *said])
            assert ids_of(mask, VOCAB) == ids_of(alone, VOCAB) == wanted


@given(limit=BUDGETS, wishes=OUTPUTS, draft=OUTPUTS, accepted=st.integers(0, 8))
def test_accepted_drafts_lead_to_the_same_position_as_emitted_tokens(
    limit: ThinkingBudget, wishes: list[int], draft: list[int], accepted: int
) -> None:
    output, kept = followed(limit, wishes), draft[:accepted]
    constraint = constraint_of(limit)
    constraint.advance_to(np.array(output, dtype=np.int32))
    assert constraint.push_tokens(draft) == len(draft)
    constraint.pop_tokens(len(draft) - len(kept))
    constraint.commit_tokens()
    for rest in ([], [A], [A, THINK]):
        constraint.advance_to(np.array([*output, *kept, *rest], dtype=np.int32))
        found = ids_of(allowed_mask(constraint), VOCAB)
        assert found == allowed_behind(limit, *output, *kept, *rest)


# --- With a grammar and a tokenizer ---

SIZE, STOP = 384, 2
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
CALL = ToolSchema(name="f", parameters=json.dumps(SCHEMA))


@pytest.fixture(scope="module")
def tokenizer(tiny_target: Path) -> Tokenizer:
    return Tokenizer.load(tiny_target)


@pytest.fixture(scope="module")
def grammars(tiny_target: Path) -> GrammarCache:
    found = GrammarCache.from_tokenizer_file(
        tiny_target / "tokenizer.json", vocab_size=SIZE, masks=LONG_MASKS
    )
    assert found is not None
    return found


def with_schema(think: ThinkTags) -> StructuredOutput:
    plain = StructuredOutput(StructuredKind.JSON_SCHEMA, json.dumps(SCHEMA))
    return wrap_structured_output(plain, special_ids={}, think=think)


def with_tool(think: ThinkTags) -> StructuredOutput:
    text = tool_call_grammar("hermes", [CALL], parallel=False, special_ids={}, think=think)
    return StructuredOutput(StructuredKind.GRAMMAR, text)


def read_schema(answer: str) -> Any:
    return json.loads(answer)


def read_tool(answer: str) -> Any:
    return json.loads(answer.strip().removeprefix("<tool_call>").removesuffix("</tool_call>"))[
        "arguments"
    ]


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "opened by the model"])
@pytest.mark.parametrize("count", [0, 1, 6])
@pytest.mark.parametrize(
    ("wrap", "read"), [(with_schema, read_schema), (with_tool, read_tool)], ids=["schema", "tool"]
)
def test_an_enforced_answer_follows_the_forced_close_tag(
    tokenizer: Tokenizer,
    grammars: GrammarCache,
    wrap: Callable[[ThinkTags], StructuredOutput],
    read: Callable[[str], Any],
    count: int,
    is_open: bool,
) -> None:
    think = ThinkTags(open_tag="<think>", close_tag="</think>", is_open=is_open)
    close_ids, opening = (
        tokenizer.encode(tag, add_special_tokens=False) for tag in ("</think>", "<think>")
    )
    limit = ThinkingBudget(
        max_tokens=count,
        open_tag="" if is_open else "<think>",
        open_ids=() if is_open else opening,
        close_tag="</think>",
        close_ids=close_ids,
    )
    grammar = grammars.compile_grammar(wrap(think))
    thought = tokenizer.encode("hm, so it is what it is", add_special_tokens=False)[:count]
    begin = [*(() if is_open else opening), *thought]
    draws = random.Random(count)
    output: list[int] = []
    constraint = make_constraint(
        None,
        grammar.start_constraint([STOP]),
        vocab_size=SIZE,
        thinking=ThinkingLimit(limit, grammars.token_bytes),
    )
    assert constraint is not None
    while len(output) < 200 and (not output or output[-1] != STOP):
        constraint.advance_to(np.array(output, dtype=np.int32))
        mask = allowed_mask(constraint)
        allowed = sorted(ids_of(mask, SIZE))
        wish = begin[len(output)] if len(output) < len(begin) else draws.choice(allowed)
        assert wish in allowed
        output.append(wish)
    assert output[: len(begin) + len(close_ids)] == [*begin, *close_ids]
    jsonschema.validate(read(tokenizer.decode(output[len(begin) + len(close_ids) :])), SCHEMA)


def test_a_character_that_has_begun_is_completed_within_a_grammar(
    tokenizer: Tokenizer, grammars: GrammarCache
) -> None:
    """Without a grammar the tag comes at once; with one it waits for the end of the character."""
    half = next(id_ for id_ in range(SIZE) if grammars.token_bytes(id_) == "é".encode()[:1])
    other = next(id_ for id_ in range(SIZE) if grammars.token_bytes(id_) == "é".encode()[1:])
    close_ids = tokenizer.encode("</think>", add_special_tokens=False)
    limit = ThinkingBudget(max_tokens=1, close_tag="</think>", close_ids=close_ids)
    thinking = ThinkingLimit(limit, grammars.token_bytes)
    think = ThinkTags(open_tag="<think>", close_tag="</think>", is_open=True)
    form = grammars.compile_grammar(with_schema(think)).start_constraint([STOP])
    for inner, behind in ((None, [half]), (form, [half, other])):
        constraint = make_constraint(None, inner, vocab_size=SIZE, thinking=thinking)
        assert constraint is not None
        constraint.advance_to(np.array(behind[:1], dtype=np.int32))
        assert is_allowed(allowed_mask(constraint), other) == (inner is not None)
        constraint.advance_to(np.array(behind, dtype=np.int32))
        assert ids_of(allowed_mask(constraint), SIZE) == {close_ids[0]}


def test_the_library_reads_tokens_as_the_router_does(
    tokenizer: Tokenizer, grammars: GrammarCache
) -> None:
    # A byte that no text has is left out by the library.
    for token in range(-1, SIZE):
        piece = tokenizer.pieces[token] if token >= 0 else b""
        assert grammars.token_bytes(token) == piece or piece == b"\xff"
