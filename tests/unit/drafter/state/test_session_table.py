"""A message that says what comes next is taken in as a whole, as entry by entry it would be."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from outrider_drafter.state.session import SessionKey, VerdictLimits
from outrider_drafter.state.session_table import AppliedVerdicts, SessionTable

from outrider.wire.messages import FeatureRows, TensorDtype, Verdict, Verdicts, WireTensor
from tests.unit.drafter.helpers import CHAIN, HIDDEN, VOCAB, Script

NAMES = ("a", "b", "c")
LIMITS = VerdictLimits(vocab_size=VOCAB, feature_size=HIDDEN, max_context=64)
COLUMNS = ("lengths", "digests", "feature_ends", "followed", "wanting", "behind")


def table(scripts: list[Script]) -> SessionTable:
    """A table that follows these sessions."""
    made = SessionTable(8, LIMITS, lambda wire: wire.data)
    for script in scripts:
        made.add_session(1, script.start(plan=CHAIN, max_len=60))
    return made


def spoilt(verdicts: Verdicts, what: str, entry: int) -> Verdicts:
    """A message of which one entry, or nothing, is not what comes next."""
    columns = {name: getattr(verdicts, name).copy() for name in ("handles", "starts", "digests")}
    features, tokens = verdicts.features, verdicts.tokens.copy()
    match what:
        case "unknown":
            columns["handles"][entry] = 2**20
        case "twice":
            columns["handles"][entry] = verdicts.handles[0]
        case "gap" | "again":
            columns["starts"][entry] += 1 if what == "gap" else -1
        case "digest":
            columns["digests"][entry] += np.uint64(1)
        case "token":
            tokens[int(verdicts.token_counts[: entry + 1].sum()) - 1] = VOCAB
        case "width" if features is not None:
            rows = features.joined()[:, :-1]
            features = FeatureRows(dtype=features.dtype, segments=(rows,))
    return Verdicts(
        **columns,
        token_counts=verdicts.token_counts,
        tokens=tokens,
        feature_starts=verdicts.feature_starts + int(what == "feature gap"),
        feature_counts=verdicts.feature_counts,
        draft_wanted=verdicts.draft_wanted,
        features=features,
    )


def scattered(verdicts: Verdicts) -> Verdicts:
    """The same, with rows that are nobody's before those of each entry, which lie the other way
    round."""
    features = verdicts.features
    if features is None:
        return verdicts
    pieces, offsets, end = [], [], 0
    for first, count in reversed(
        list(zip(verdicts.first_rows().tolist(), verdicts.feature_counts.tolist(), strict=True))
    ):
        mine = features.joined()[first : first + count]
        pieces += [np.full((2, features.width), np.nan, mine.dtype), mine]
        offsets.append(end + 2)
        end += 2 + count
    memory = FeatureRows(dtype=features.dtype, segments=(np.concatenate(pieces),))
    return replace(verdicts, features=memory, feature_offsets=np.array(offsets[::-1]))


def told(script: Script, count: int, *, wanted: bool, fed: bool) -> Verdict:
    """What comes next of a session; where it brings no features, it has an empty array of them."""
    verdict = script.entry(script.told + count, draft_wanted=wanted, with_features=fed)
    nothing = WireTensor(dtype=TensorDtype.FLOAT32, data=script.features[:0].copy())
    return verdict if fed else replace(verdict, features=nothing)


MISTAKES = ("unknown", "twice", "gap", "again", "digest", "token", "width", "feature gap")


@given(st.data())
@settings(max_examples=200)
def test_whole_messages_are_taken_in_as_their_entries_wherever_features_lie(
    data: st.DataObject,
) -> None:
    scripts = [Script(name, seed=seed, length=80) for seed, name in enumerate(NAMES)]
    ours, theirs = table(scripts), table(scripts)
    for _ in range(data.draw(st.integers(1, 5))):
        order = data.draw(st.permutations(scripts))[: data.draw(st.integers(1, 3))]
        fed = data.draw(st.booleans())
        message = Verdicts.of_verdicts(
            [
                told(
                    script,
                    data.draw(st.integers(1, 15)),
                    wanted=data.draw(st.booleans()),
                    fed=fed,
                )
                for script in order
            ]
        )
        what = data.draw(st.sampled_from(("",) * 6 + MISTAKES))
        message = spoilt(message, what, data.draw(st.integers(0, len(order) - 1)))
        in_place = data.draw(st.booleans())
        found = ours.apply_verdicts(1, scattered(message) if in_place else message)
        with patch.object(SessionTable, "take_in_whole", return_value=False):
            expected = theirs.apply_verdicts(1, message)
        assert names(found) == names(expected)
        for column in COLUMNS:
            np.testing.assert_array_equal(getattr(ours, column), getattr(theirs, column))
        for slot, length in enumerate(ours.lengths.tolist()):
            np.testing.assert_array_equal(ours.tokens[slot, :length], theirs.tokens[slot, :length])
        for script in scripts:
            same_features(ours, theirs, script)
        for session, _ in found.lost:
            ours.forget_session(session)
        for session, _ in expected.lost:
            theirs.forget_session(session)


def names(taken: AppliedVerdicts) -> tuple[list[int], list[tuple[int, str]], int]:
    """What is compared of an outcome."""
    lost = sorted((session.slot, reason) for session, reason in taken.lost)
    return sorted(taken.slots.tolist()), lost, taken.unknown


def same_features(ours: SessionTable, theirs: SessionTable, script: Script) -> None:
    """All features of a session that is followed are held by both."""
    session = ours.get(SessionKey(1, script.handle))
    if session is None or not ours.followed[session.slot]:
        return
    end = int(ours.feature_ends[session.slot])
    if end:
        np.testing.assert_array_equal(
            ours.features.read_rows(session.slot, 0, end),
            theirs.features.read_rows(session.slot, 0, end),
        )


def test_the_usual_message_is_taken_in_as_a_whole() -> None:
    scripts = [Script(name, seed=seed, length=80) for seed, name in enumerate(NAMES)]
    made = table(scripts)
    for size in (5, 3, 4):
        message = Verdicts.of_verdicts(
            [script.entry(script.told + size) for script in scripts[::-1]]
        )
        found = [made.get(SessionKey(1, handle)) for handle in message.handles.tolist()]
        slots = np.array([session.slot for session in found if session is not None])
        assert made.take_in_whole(message, slots)
        assert bool(made.wanting[slots].all())
    for script in scripts:
        session = made.get(SessionKey(1, script.handle))
        assert session is not None
        assert session.tokens.view.tolist() == script.tokens[:12].tolist()
