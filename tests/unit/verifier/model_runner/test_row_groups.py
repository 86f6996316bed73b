"""Which rows share a launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from outrider_verifier.exchange.proposal_inbox import HeldProposal
from outrider_verifier.model_runner.batch import PrefillRow, VerifyDraft, VerifyRow
from outrider_verifier.model_runner.gpu_runner.device_slots import DeviceSlot
from outrider_verifier.model_runner.gpu_runner.launch_groups import (
    LaunchGroup,
    add_prompts,
    group_rows,
    round_rows,
)
from outrider_verifier.state.session import Session

from outrider.engine.device.graphs.shape_family import ShapeFamily
from outrider.engine.device.graphs.shapes import CHUNK_TOKENS, AcceptanceMode, DraftKind
from outrider.spec.draft_distribution import make_distribution
from outrider.spec.sampling import Rule, SamplingParams
from outrider.wire.messages import Proposal, Proposals
from tests.fakes.scripted_drafter import make_tree
from tests.fakes.target import FakeTarget
from tests.unit.verifier.harness import make_spec

GREEDY = SamplingParams()
PENALTY = SamplingParams(repetition_penalty=1.3)
REJECTION = SamplingParams(temperature=1.0, rule=Rule.REJECTION)
CHAIN, BRANCHES = (-1, 0, 1), (-1, -1, 0)


def row(
    sampling: SamplingParams = GREEDY,
    *,
    parents: Sequence[int] | None = None,
    in_process_depth: int = 0,
) -> VerifyRow:
    """A row of a decoding session, with a draft of the given form or none."""
    session = Session.create(
        make_spec(sampling=sampling),
        ticket=1,
        kv=FakeTarget(num_blocks=8).pool.allocate(32),
        now=0.0,
        keeps_features=False,
    )
    draft = None
    if parents is not None:
        draft = VerifyDraft(tree=make_tree(range(len(parents)), parents), distribution=None)
    return VerifyRow(session, draft=draft, in_process_depth=in_process_depth)


def on_link(link_id: int | None) -> VerifyRow:
    found = row()
    found.session.link_id = link_id
    return found


@pytest.mark.parametrize(
    ("links", "prompt", "expected"),
    [
        ([1, 1], "nobody", 1),
        ([1, 1], 1, 1),
        ([1, 2], "nobody", None),
        ([1, None], "nobody", None),
        ([1, 1], 2, None),
        ([1, 1], None, None),
        ([None], "nobody", None),
    ],
)
def test_only_a_launch_of_one_drafters_sessions_may_be_seen_by_it(
    links: list[int | None], prompt: int | str | None, expected: int | None
) -> None:
    rows = [on_link(link_id) for link_id in links]
    groups = group_rows(rows, seats(rows), any_number)
    if prompt != "nobody":
        session = on_link(prompt if isinstance(prompt, int) else None).session
        chunk = PrefillRow(session=session, start=0, num_tokens=3, last=False)
        mine = DeviceSlot.create(session, len(rows), warped=False)
        add_prompts(groups, [(0, chunk, mine)], in_process_drafter=False, mixes=lambda *_: True)
    (group,) = groups
    assert group.link_id == expected


def any_number(nodes: int) -> int:
    """Rows that a launch may have."""
    return 256


def warps(row: VerifyRow) -> bool:
    return row.session.spec.sampling is PENALTY


def seats(rows: Sequence[VerifyRow], drafted: Sequence[int] = ()) -> list[DeviceSlot]:
    found = [
        DeviceSlot.create(row.session, slot, warped=warps(row)) for slot, row in enumerate(rows)
    ]
    for place in drafted:
        found[place].has_current_draft = True
    return found


def test_rows_of_one_kind_are_one_group_in_order() -> None:
    rows = [row(parents=CHAIN), row(), row(parents=CHAIN)]
    places = seats(rows)
    (group,) = group_rows(rows, places, any_number)
    assert (group.round_indices, group.rows, group.device_slots) == ([0, 1, 2], rows, places)
    assert (group.drafts, group.acceptance_mode, group.has_in_process_drafts) == (
        DraftKind.CHAIN,
        AcceptanceMode.MATCH,
        False,
    )


def test_rows_are_split_by_judge_and_by_whose_drafts_they_verify() -> None:
    rows = [
        row(PENALTY, in_process_depth=3),
        row(in_process_depth=3),
        row(PENALTY),
        row(),
        row(in_process_depth=3),
        row(REJECTION, in_process_depth=3),
    ]
    groups = group_rows(rows, seats(rows, drafted=[0, 1, 2, 5]), any_number)
    # Row 2 stands for nothing of its draft, row 4 has none that follows its prefix.
    assert [(g.round_indices, g.drafts, g.acceptance_mode) for g in groups] == [
        ([2, 3, 4], DraftKind.NONE, AcceptanceMode.SAMPLED),
        ([0, 1, 5], DraftKind.IN_PROCESS, AcceptanceMode.REJECTION),
    ]
    for group in groups:
        assert [seat.slot for seat in group.device_slots] == group.round_indices
        assert group.rows == [rows[place] for place in group.round_indices]


@pytest.mark.parametrize(
    ("decoding", "prompt", "expected"),
    [
        ((), GREEDY, AcceptanceMode.MATCH),
        ((), REJECTION, AcceptanceMode.REJECTION),
        ((GREEDY,), PENALTY, AcceptanceMode.SAMPLED),
        ((PENALTY,), REJECTION, AcceptanceMode.REJECTION),
        ((REJECTION,), GREEDY, AcceptanceMode.REJECTION),
        ((replace(REJECTION, temperature=0.0),), GREEDY, AcceptanceMode.MATCH),
    ],
)
def test_a_launch_is_judged_as_its_most_demanding_session_asks(
    decoding: Sequence[SamplingParams], prompt: SamplingParams, expected: AcceptanceMode
) -> None:
    rows = [row(sampling) for sampling in decoding]
    groups, own = group_rows(rows, seats(rows), any_number), row(prompt)
    chunk = PrefillRow(session=own.session, start=0, num_tokens=3, last=False)
    mine = DeviceSlot.create(own.session, len(rows), warped=warps(own))
    add_prompts(groups, [(0, chunk, mine)], in_process_drafter=False, mixes=lambda *_: True)
    (group,) = groups
    assert group.acceptance_mode is expected


@pytest.mark.parametrize(
    ("forms", "drafts"),
    [
        ([None, ()], DraftKind.NONE),
        ([None, CHAIN, (-1,)], DraftKind.CHAIN),
        ([CHAIN, BRANCHES], DraftKind.TREE),
        ([(-1, -1)], DraftKind.TREE),
    ],
)
def test_one_branch_makes_trees_of_a_groups_drafts(
    forms: list[Sequence[int] | None], drafts: DraftKind
) -> None:
    rows = [row(parents=form) for form in forms]
    assert round_rows(rows, seats(rows)).draft_kind is drafts


@pytest.mark.parametrize("lengths", [(3, 3), (2, 0, 3), (0, 0)])
@pytest.mark.parametrize("backwards", [False, True])
def test_drafts_of_one_message_are_told_as_single_ones_are(
    lengths: Sequence[int], backwards: bool
) -> None:
    drafts = [make_tree(range(10 * i, 10 * i + n)) for i, n in enumerate(lengths)]
    message = Proposals.of_proposals(
        [
            Proposal(handle=i, prefix_digest=1, prefix_len=9, tree=draft)
            for i, draft in enumerate(drafts)
        ]
    )
    held = [HeldProposal(message, i, n) for i, n in enumerate(lengths)]
    order = list(range(len(lengths)))[:: -1 if backwards else 1]
    sessions = [row().session for _ in order]
    together = [VerifyRow(session, held[i]) for session, i in zip(sessions, order, strict=True)]
    alone = [
        VerifyRow(session, draft=VerifyDraft(tree=drafts[i], distribution=None))
        for session, i in zip(sessions, order, strict=True)
    ]
    # And a row without a draft.
    together.append(VerifyRow(sessions[0]))
    alone.append(VerifyRow(sessions[0]))
    found, expected = (round_rows(rows, seats(rows)) for rows in (together, alone))
    assert found.slots == expected.slots
    for ours, theirs in zip(found[1:4], expected[1:4], strict=True):
        assert ours.tolist() == theirs.tolist()  # type: ignore[union-attr]
    assert found.draft_kind is expected.draft_kind and found.max_nodes == max(lengths)


def test_what_a_message_says_of_laws_and_cuts_is_told_row_by_row() -> None:
    distribution = make_distribution(2, {0: (np.array([0], np.int32), np.array([5], np.uint16))})
    tree = make_tree([0, 7])
    message = Proposals.of_proposals(
        [Proposal(handle=0, prefix_digest=1, prefix_len=9, tree=tree, distribution=distribution)]
    )
    judged = VerifyRow(row(REJECTION).session, HeldProposal(message, 0, 2))
    found = round_rows([judged], seats([judged]))
    assert found.distributions is not None and found.distributions[0] is not None
    assert found.distributions[0].ids.tolist() == [0]
    short = VerifyRow(
        judged.session, judged.held, draft=VerifyDraft(tree=make_tree([0]), distribution=None)
    )
    assert round_rows([short], seats([short])).tokens.tolist() == [0]


def with_prompt(
    groups: list[LaunchGroup], *, in_process_nodes: int, tokens: int = 2
) -> LaunchGroup:
    """The launch that a prompt of a session without in-process drafts joins."""
    family = ShapeFamily(
        max_rows=8,
        max_nodes=9,
        in_process_nodes=in_process_nodes,
        has_features=False,
        has_sampled_acceptance=True,
        max_prefill_tokens=2048,
    )
    prompt = PrefillRow(session=row().session, start=0, num_tokens=tokens, last=False)
    device_slot = DeviceSlot.create(prompt.session, 7, warped=False)
    add_prompts(
        groups,
        [(0, prompt, device_slot)],
        in_process_drafter=in_process_nodes > 0,
        mixes=family.allows_prefill,
    )
    (joined,) = [group for group in groups if group.prompts]
    return joined


def test_prompts_share_the_launch_of_rows_with_drafts_from_outside() -> None:
    rows = [row(parents=CHAIN)]
    assert with_prompt(group_rows(rows, seats(rows), any_number), in_process_nodes=0).rows == rows


@pytest.mark.parametrize(("parents", "shares"), [(CHAIN, True), (BRANCHES, False)])
def test_many_chunks_of_prompts_keep_out_of_launches_with_trees(
    parents: Sequence[int], shares: bool
) -> None:
    rows = [row(parents=parents)]
    groups = group_rows(rows, seats(rows), any_number)
    joined = with_prompt(groups, in_process_nodes=0, tokens=17 * CHUNK_TOKENS)
    assert joined.rows == (rows if shares else [])


def test_beside_an_own_head_prompts_keep_out_of_launches_with_drafts_from_outside() -> None:
    rows = [row(parents=CHAIN)]
    groups = group_rows(rows, seats(rows), any_number)
    joined = with_prompt(groups, in_process_nodes=5)
    assert len(groups) == 2
    assert (joined.rows, joined.drafts) == ([], DraftKind.NONE)


def test_beside_an_own_head_prompts_join_plain_rows() -> None:
    rows = [row()]
    assert with_prompt(group_rows(rows, seats(rows), any_number), in_process_nodes=5).rows == rows
