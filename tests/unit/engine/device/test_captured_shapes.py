"""No round, whatever its rows, leaves the family of shapes that is captured at the start."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.engine.device.graphs.shape_family import ShapeFamily
from outrider.engine.device.graphs.shapes import (
    CHUNK_TOKENS,
    MAX_CHUNKS,
    MAX_TOKEN_ROWS,
    AcceptanceMode,
    DraftKind,
)

FAMILIES = {
    "plain": {"max_nodes": 1, "in_process_nodes": 0, "has_features": False},
    "separate": {"max_nodes": 65, "in_process_nodes": 0, "has_features": True},
    "own": {"max_nodes": 65, "in_process_nodes": 4, "has_features": True},
    "own with trees": {
        "max_nodes": 65,
        "in_process_nodes": 5,
        "in_process_tree_nodes": 17,
        "short_chain_nodes": 4,
        "has_features": True,
    },
    "remote": {
        "max_nodes": 65,
        "in_process_nodes": 4,
        "short_chain_nodes": 3,
        "has_features": True,
        "has_remote_distributions": True,
    },
}


BUDGET = 2048
"""The default of a CUDA device."""


def family(name: str, max_rows: int = 64, budget: int = BUDGET) -> ShapeFamily:
    """The family of a placement."""
    return ShapeFamily(
        max_rows=max_rows,
        has_sampled_acceptance=True,
        max_prefill_tokens=budget,
        **FAMILIES[name],
    )


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("max_rows", [1, 5, 64, 256])
@pytest.mark.parametrize("budget", [16, BUDGET, 1 << 20])
@given(data=st.data())
def test_every_round_has_its_shape_in_the_family(
    name: str, max_rows: int, budget: int, data: st.DataObject
) -> None:
    shapes = family(name, max_rows, budget)
    own, most = FAMILIES[name]["in_process_nodes"], int(FAMILIES[name]["max_nodes"])
    kinds = [DraftKind.NONE, *([DraftKind.IN_PROCESS] if own else [])]
    kinds += [DraftKind.CHAIN, DraftKind.TREE] if most > 1 else []
    drafts = data.draw(st.sampled_from(kinds))
    nodes = data.draw(st.integers(2, most)) if drafts in (DraftKind.CHAIN, DraftKind.TREE) else 1
    if drafts is DraftKind.IN_PROCESS:
        nodes = data.draw(st.sampled_from([own, FAMILIES[name].get("short_chain_nodes", own)]))
    most_rows = shapes.max_rows(nodes)
    rows = data.draw(st.integers(0, most_rows))
    most_chunks = shapes.max_prefill_tokens // CHUNK_TOKENS
    chunks = data.draw(st.integers(0 if rows else 1, most_chunks))
    if rows and not shapes.allows_prefill(drafts, nodes, chunks):
        chunks = 0
    shape = shapes.fit_shape(
        rows=rows,
        nodes=nodes,
        draft_kind=drafts,
        acceptance_mode=data.draw(st.sampled_from(AcceptanceMode)),
        has_features=data.draw(st.booleans()) and bool(FAMILIES[name]["has_features"]),
        chunks=chunks,
    )
    assert shape in set(shapes.all_shapes())
    assert shape.rows >= rows
    assert shape.chunks >= chunks
    assert not rows or drafts is DraftKind.IN_PROCESS or shape.nodes >= nodes


@pytest.mark.parametrize("name", FAMILIES)
def test_the_family_is_small_and_has_no_shape_twice(name: str) -> None:
    shapes = list(family(name).all_shapes())
    assert len(set(shapes)) == len(shapes) < 600


def test_a_family_holds_the_prompt_tokens_that_are_planned_with_up_to_a_bound() -> None:
    assert family("own", budget=2000).max_prefill_tokens == 2016
    assert family("own", budget=1 << 20).max_prefill_tokens == MAX_CHUNKS * CHUNK_TOKENS
    assert len(list(family("own", budget=512).all_shapes())) < len(list(family("own").all_shapes()))


@pytest.mark.parametrize(
    ("rows", "chunks", "asked", "nodes"),
    [
        (64, 0, AcceptanceMode.MATCH, 3),
        (64, 0, AcceptanceMode.SAMPLED, 3),
        (64, 0, AcceptanceMode.REJECTION, 3),
        (64, 2, AcceptanceMode.MATCH, 3),
        (64, 3, AcceptanceMode.REJECTION, 3),
        (64, 4, AcceptanceMode.MATCH, 4),
        (24, 0, AcceptanceMode.MATCH, 4),
    ],
)
def test_only_large_rounds_of_decoding_sessions_have_shorter_chains(
    rows: int, chunks: int, asked: AcceptanceMode, nodes: int
) -> None:
    shape = family("remote").fit_shape(
        rows=rows,
        nodes=3,
        draft_kind=DraftKind.IN_PROCESS,
        acceptance_mode=asked,
        has_features=True,
        chunks=chunks,
    )
    assert shape.nodes == nodes


M, S, R = AcceptanceMode


@pytest.mark.parametrize(
    ("name", "chunks", "expected"),
    [("own", 0, (M, S, S)), ("remote", 0, (M, S, R)), ("remote", 3, (M, R, R))],
)
def test_only_rounds_that_may_have_distributions_of_another_device_take_them(
    name: str, chunks: int, expected: tuple[AcceptanceMode, ...]
) -> None:
    shapes = family(name)

    def mode(rows: int, drafts: DraftKind, asked: AcceptanceMode) -> AcceptanceMode:
        return shapes.fit_shape(
            rows=rows,
            nodes=1,
            draft_kind=drafts,
            acceptance_mode=asked,
            has_features=True,
            chunks=chunks,
        ).acceptance_mode

    assert tuple(mode(5, DraftKind.IN_PROCESS, asked) for asked in AcceptanceMode) == expected
    assert {mode(5, DraftKind.NONE, asked) for asked in AcceptanceMode} == {S}
    if chunks:
        assert mode(0, DraftKind.IN_PROCESS, R) is S


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_without_drafts_share_a_launch_however_many_they_are(name: str) -> None:
    assert family(name, 256).max_rows(1) == 256


def test_trees_from_outside_never_fill_more_than_a_launch_takes() -> None:
    shapes = family("separate")
    for nodes in range(2, 66):
        shape = shapes.fit_shape(
            rows=shapes.max_rows(nodes),
            nodes=nodes,
            draft_kind=DraftKind.TREE,
            acceptance_mode=AcceptanceMode.MATCH,
            has_features=True,
            chunks=0,
        )
        assert shape.rows * shape.nodes <= MAX_TOKEN_ROWS
