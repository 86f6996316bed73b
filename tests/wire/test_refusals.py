"""Each way in which a peer may be wrong is refused with a message that says so."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from outrider.errors import InvalidMessageError, InvalidRequestError
from outrider.spec.structured_output import MAX_STRUCTURE_BYTES
from outrider.wire import codec
from outrider.wire.inference import GenerateRequest, SamplingOptions, TextPrompt
from outrider.wire.inference_codec import request_from_pb, request_to_pb
from outrider.wire.inference_response_codec import event_from_pb
from outrider.wire.limits import MAX_MESSAGE_BYTES
from outrider.wire.messages import (
    MALFORMED_ROW,
    MalformedOpen,
    Proposals,
    SessionEvents,
    SessionOpen,
)
from outrider.wire.pool_codec import address_from_pb
from outrider.wire.rounds import valid_proposals
from outrider.wire.server_info_codec import server_info_from_pb
from outrider.wire.v1 import common_pb2, control_pb2, exchange_pb2, inference_pb2, pool_pb2
from tests.wire.samples import PLAN, SAMPLES, SAMPLING, SESSION, TREE, encoder


def logprob_events_pb() -> control_pb2.SessionsResponse:
    encoded = codec.encode_sessions_message(SAMPLES["logprobs_events"][1])
    return control_pb2.SessionsResponse.FromString(encoded)


def int32(*values: int) -> bytes:
    return np.array(values, dtype="<i4").tobytes()


def column(message: Any, place: int, values: bytes) -> None:
    """Put other values into a column of a message of verdicts or proposals."""
    size = len(values)
    columns = message.columns
    message.columns = columns[: place * size] + values + columns[(place + 1) * size :]


def float32(*values: float) -> bytes:
    return np.array(values, dtype="<f4").tobytes()


def proposals_pb() -> exchange_pb2.ExchangeRequest:
    encoded = codec.encode_drafter_message(SAMPLES["proposals"][1])
    return exchange_pb2.ExchangeRequest.FromString(encoded)


def verdicts_pb() -> exchange_pb2.ExchangeResponse:
    encoded = codec.encode_verifier_message(SAMPLES["verdicts"][1])
    return exchange_pb2.ExchangeResponse.FromString(encoded)


def open_pb() -> control_pb2.SessionsRequest:
    encoded = codec.encode_sessions_request(SAMPLES["session_open"][1])
    return control_pb2.SessionsRequest.FromString(encoded)


def events_pb() -> control_pb2.SessionsResponse:
    encoded = codec.encode_sessions_message(SAMPLES["session_events"][1])
    return control_pb2.SessionsResponse.FromString(encoded)


Change = Callable[[Any], object]

BAD_PROPOSALS: dict[str, tuple[Change, str]] = {
    "nobody": (lambda p: setattr(p, "columns", b""), r"proposals must be in \[1, "),
    "odd bytes": (lambda p: setattr(p, "tokens", b"\0" * 5), "tokens: 5 bytes are not a multiple"),
    "digests": (lambda p: setattr(p, "digests", b"\0" * 8), "digests must have 2 entries, got 1"),
    "columns": (lambda p: setattr(p, "columns", int32(1, 2)), "2 numbers are not 3 columns"),
    "entries": (lambda p: setattr(p, "columns", int32(1, 2, 3)), "digests must have 1 entries"),
    "many nodes": (
        lambda p: column(p, 2, int32(2, 600)),
        r"nodes must be in \[0, 512",
    ),
    "tokens": (lambda p: setattr(p, "tokens", int32(1)), "tokens must have 5 entries"),
    "parents": (lambda p: setattr(p, "parents", int32(-1)), "parents must have 5 entries"),
    "logprobs": (lambda p: setattr(p, "logprobs", float32(0)), "logprobs must have 5 entries"),
    "law of whom": (
        lambda p: setattr(p, "has_distribution", b"\1"),
        "has_distribution must have 2 entries",
    ),
    "law or not": (
        lambda p: setattr(p, "has_distribution", b"\0\2"),
        "has_distribution must be 0 or 1",
    ),
    "law of nobody": (
        lambda p: setattr(p, "has_distribution", b""),
        "distribution_lens must have 0 entries",
    ),
    "law slots": (
        lambda p: setattr(p, "distribution_lens", int32(3)),
        "distribution_lens must have 4 entries",
    ),
    "law sizes": (
        lambda p: setattr(p, "distribution_lens", int32(3, 2, 0, 0)),
        "distribution_token_ids must have 5",
    ),
    "huge law": (
        lambda p: setattr(p, "distribution_lens", int32(-1, 0, 0, 0)),
        "distribution entries must be in",
    ),
    "law counts": (
        lambda p: setattr(p, "distribution_counts", b"\1\0"),
        "distribution_counts must have 3 entries",
    ),
}


@pytest.mark.parametrize("name", BAD_PROPOSALS)
def test_proposals_whose_arrays_disagree_are_refused(name: str) -> None:
    change, reason = BAD_PROPOSALS[name]
    message = proposals_pb()
    change(message.proposals)
    with pytest.raises(InvalidMessageError, match=reason):
        codec.decode_drafter_message(message.SerializeToString())


BAD_VERDICTS: dict[str, tuple[Change, str]] = {
    "nobody": (lambda v: setattr(v, "columns", b""), r"verdicts must be in \[1, "),
    "columns": (lambda v: setattr(v, "columns", int32(1)), "1 numbers are not 6 columns"),
    "tokens": (lambda v: setattr(v, "tokens", int32(1)), "tokens must have 5 entries"),
    "too few tokens": (lambda v: column(v, 2, int32(-1, 1)), "tokens must have"),
    "digests": (lambda v: setattr(v, "digests", b"\0" * 24), "digests must have 2 entries"),
    "wishes": (lambda v: column(v, 5, int32(1, 3)), "draft_wanted must be 0 or 1"),
    "dtype": (lambda v: setattr(v, "feature_dtype", 99), "floating point, got element type 99"),
    "integer features": (
        lambda v: setattr(v, "feature_dtype", common_pb2.TENSOR_DTYPE_UINT16),
        "floating point",
    ),
    "width": (lambda v: setattr(v, "feature_width", 0), "feature_width must be in"),
    "huge width": (lambda v: setattr(v, "feature_width", 2**31), "feature_width must be in"),
    "size": (lambda v: setattr(v, "features", b"\0" * 7), "are not 7 bytes"),
    "rows": (lambda v: column(v, 4, int32(2, 1)), "3 rows of 2 bfloat16"),
    "no rows": (lambda v: column(v, 4, int32(0, 0)), "0 rows of 2 bfloat16"),
    "offsets": (lambda v: setattr(v, "feature_offsets", int32(0)), "must have 2 entries, got 1"),
    "odd offsets": (lambda v: setattr(v, "feature_offsets", b"\0" * 6), "6 bytes are not a"),
    "beyond": (lambda v: setattr(v, "feature_offsets", int32(1, 0)), "beyond the 2 rows"),
    "far beyond": (lambda v: setattr(v, "feature_offsets", int32(-1, 0)), "beyond the 2 rows"),
    "beyond, of none": (lambda v: setattr(v, "feature_offsets", int32(0, 3)), "beyond the 2 rows"),
    "half a row": (
        lambda v: (
            setattr(v, "feature_offsets", int32(0, 0)),
            setattr(v, "features", b"\0" * 11),
        ),
        "are not 11 bytes",
    ),
}


@pytest.mark.parametrize("name", BAD_VERDICTS)
def test_verdicts_whose_arrays_disagree_are_refused(name: str) -> None:
    change, reason = BAD_VERDICTS[name]
    message = verdicts_pb()
    change(message.verdicts)
    with pytest.raises(InvalidMessageError, match=reason):
        codec.decode_verifier_message(message.SerializeToString())


@pytest.mark.parametrize("handle", [2**20, 2**32 - 1])
def test_a_handle_beyond_the_bound_is_refused(handle: int) -> None:
    for message in (
        exchange_pb2.ExchangeResponse(session_end={"handle": handle}),
        exchange_pb2.ExchangeResponse(plan_change={"handle": handle}),
        exchange_pb2.ExchangeResponse(session_start={"handle": handle, "session_id": "s"}),
    ):
        with pytest.raises(InvalidMessageError, match="handle must be in"):
            codec.decode_verifier_message(message.SerializeToString())


BAD_ENTRIES: dict[str, Change] = {
    "negative id": lambda p: setattr(p, "tokens", int32(8, 9, -1, 12, 49151)),
    "id beyond the vocabulary": lambda p: setattr(p, "tokens", int32(8, 9, 11, 12, 49152)),
    "parent later": lambda p: setattr(p, "parents", int32(-1, 0, -1, 2, 0)),
    "parent self": lambda p: setattr(p, "parents", int32(-1, 0, 0, -1, 0)),
    "parent below root": lambda p: setattr(p, "parents", int32(-1, 0, -2, -1, 0)),
    "parent far away": lambda p: setattr(p, "parents", int32(-1, 0, -(2**31), -1, 2**31 - 1)),
    "twins": lambda p: setattr(p, "tokens", int32(8, 9, 11, 11, 49151)),
    "nan": lambda p: setattr(p, "logprobs", float32(0, 0, math.nan, -1, -1)),
    "infinite": lambda p: setattr(p, "logprobs", float32(0, 0, -math.inf, -1, -math.inf)),
    "positive": lambda p: setattr(p, "logprobs", float32(0, 0, 0.5, -1.5, -0.75)),
    "rising": lambda p: setattr(p, "logprobs", float32(0, 0, -0.25, -1.5, -0.1)),
    "law counts": lambda p: setattr(p, "distribution_counts", b"\0\0" * 3),
    "law order": lambda p: setattr(p, "distribution_token_ids", int32(12, 11, 49151)),
    "law ids": lambda p: setattr(p, "distribution_token_ids", int32(11, 12, -5)),
    "law misses a child": lambda p: setattr(p, "distribution_token_ids", int32(11, 13, 49151)),
    "law of a leaf": lambda p: setattr(p, "distribution_lens", int32(2, 0, 0, 1)),
    "no prefix": lambda p: column(p, 1, int32(7, 0)),
    "handle": lambda p: column(p, 0, int32(3, -1)),
}


@pytest.mark.parametrize("name", BAD_ENTRIES)
def test_a_bad_entry_costs_itself_alone(name: str) -> None:
    message = proposals_pb()
    BAD_ENTRIES[name](message.proposals)
    decoded = codec.decode_drafter_message(message.SerializeToString())
    assert isinstance(decoded, Proposals)
    assert valid_proposals(decoded, vocab_size=49152, max_nodes=256).tolist() == [True, False]


def test_entries_of_one_session_may_be_for_different_prefixes() -> None:
    message = proposals_pb()
    column(message.proposals, 0, int32(3, 3))
    decoded = codec.decode_drafter_message(message.SerializeToString())
    assert isinstance(decoded, Proposals)
    assert valid_proposals(decoded, vocab_size=49152, max_nodes=256).tolist() == [True, True]


BAD_SPECS: dict[str, tuple[Change, str]] = {
    "no tokens": (lambda s: s.ClearField("token_ids"), "token_ids must not be empty"),
    "huge id": (lambda s: s.token_ids.append(2**31), "token_ids must be below"),
    "prompt": (lambda s: setattr(s, "prompt_len", 5), r"prompt_len must be in \[0, 4\]"),
    "nothing to emit": (lambda s: setattr(s, "max_new_tokens", 0), "max_new_tokens"),
    "stops": (lambda s: s.stop_token_ids.extend(range(300)), "at most 256 entries"),
    "temperature": (lambda s: setattr(s.sampling, "temperature", math.nan), "temperature"),
    "top_p": (lambda s: setattr(s.sampling, "top_p", 0.0), r"top_p must be in \(0, 1\]"),
    "rule": (lambda s: setattr(s.sampling, "rule", 77), "rule must be one of"),
    "plan": (lambda s: setattr(s.plan, "draft_tokens", 257), "draft_tokens must be in"),
    "method": (lambda s: setattr(s.plan, "method", 50), "method must be one of"),
    "logprobs": (lambda s: setattr(s, "top_logprobs", 21), r"top_logprobs must be in \[0, 20\]"),
    "drafter": (lambda s: setattr(s, "drafter_id", ""), "drafter_id must not be empty"),
}


@pytest.mark.parametrize("name", BAD_SPECS)
def test_a_bad_session_spec_is_refused(name: str) -> None:
    change, reason = BAD_SPECS[name]
    message = open_pb()
    change(message.open.spec)
    refused = codec.decode_sessions_request(message.SerializeToString())
    assert isinstance(refused, MalformedOpen)
    assert refused.handle == 7
    with pytest.raises(InvalidMessageError, match=reason):
        raise refused.error


BAD_EVENTS: dict[str, tuple[Change, str]] = {
    "odd bytes": (lambda e: setattr(e, "handles", b"\0" * 5), "not a multiple of 4"),
    "fewer handles": (lambda e: setattr(e, "handles", int32(7)), "must have 1 rows, got 2"),
    "fewer reasons": (lambda e: setattr(e, "finish_reasons", b"\0"), "must have 2 rows, got 1"),
    "counts": (lambda e: setattr(e, "counts", int32(3, 2)), "say 5 tokens, got 4"),
    "huge count": (lambda e: setattr(e, "counts", int32(-1, 1)), "say 4294967296 tokens"),
    "many rows": (lambda e: setattr(e, "flags", bytes(1 << 17)), "at most 65536 entries"),
    "fewer cached": (lambda e: setattr(e, "cached_tokens", int32(1)), "must have 2 rows, got 1"),
}


@pytest.mark.parametrize("name", BAD_EVENTS)
def test_columns_that_do_not_fit_each_other_are_refused(name: str) -> None:
    change, reason = BAD_EVENTS[name]
    message = events_pb()
    change(message.events)
    with pytest.raises(InvalidMessageError, match=reason):
        codec.decode_sessions_message(message.SerializeToString())


BAD_ROWS: dict[str, Change] = {
    "negative id": lambda e: setattr(e, "tokens", int32(11, -1, 7, 5)),
    "huge id": lambda e: setattr(e, "tokens", int32(11, 1, 2**30, 5)),
    "reason": lambda e: setattr(e, "finish_reasons", b"\x09\0"),
    "reserved reason": lambda e: setattr(e, "finish_reasons", b"\xff\0"),
    "more accepted than proposed": lambda e: setattr(e, "accepted", b"\x01\x02\0\0"),
    "many proposed": lambda e: setattr(e, "proposed", b"\x01\x02\0\0"),
    "many cached": lambda e: setattr(e, "cached_tokens", int32(2**24 + 1, 2**24)),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_row_that_makes_no_sense_costs_its_own_session(name: str) -> None:
    message = events_pb()
    BAD_ROWS[name](message.events)
    events = codec.decode_sessions_message(message.SerializeToString())
    assert isinstance(events, SessionEvents)
    assert events.finish_reasons.tolist() == [MALFORMED_ROW, 0]


BAD_LOGPROBS: dict[str, tuple[Change, str]] = {
    "widths of whom": (
        lambda e: setattr(e, "logprob_widths", b"\3"),
        "logprob_widths must have 3 rows, got 1",
    ),
    "none said": (lambda e: e.ClearField("logprob_widths"), "logprob_widths must have 3 rows"),
    "wide": (lambda e: setattr(e, "logprob_widths", b"\x16\0\1"), "at most 21, got 22"),
    "values": (lambda e: setattr(e, "logprobs", float32(-1)), "logprobs must have 7 entries"),
    "ids": (lambda e: setattr(e, "top_ids", int32(1)), "top_ids must have 4 entries, got 1"),
    "odd bytes": (lambda e: setattr(e, "logprobs", b"\0" * 5), "not a multiple of 4"),
}


@pytest.mark.parametrize("name", BAD_LOGPROBS)
def test_columns_of_logprobs_that_do_not_fit_are_refused(name: str) -> None:
    change, reason = BAD_LOGPROBS[name]
    message = logprob_events_pb()
    change(message.events)
    with pytest.raises(InvalidMessageError, match=reason):
        codec.decode_sessions_message(message.SerializeToString())


@pytest.mark.parametrize("value", [math.nan, 0.1, math.inf, -math.inf, -10000.0])
def test_what_is_no_logarithm_of_a_probability_costs_its_own_session(value: float) -> None:
    message = logprob_events_pb()
    message.events.logprobs = float32(-1, -1, -1, -1, value, -1, -1)
    events = codec.decode_sessions_message(message.SerializeToString())
    assert isinstance(events, SessionEvents)
    assert events.finish_reasons.tolist() == [MALFORMED_ROW, 0, 0]


@pytest.mark.parametrize("id_", [-1, 2**24])
def test_a_probable_id_that_is_none_costs_its_own_session(id_: int) -> None:
    message = logprob_events_pb()
    message.events.top_ids = int32(12, 11, id_, 49151)
    events = codec.decode_sessions_message(message.SerializeToString())
    assert isinstance(events, SessionEvents)
    assert events.finish_reasons.tolist() == [MALFORMED_ROW, 0, 0]


BAD_DELTAS: dict[str, tuple[Change, str]] = {
    "too few": (lambda d: d.logprobs.pop(), "logprobs must have 2 entries or none, got 1"),
    "ids alone": (
        lambda d: d.logprobs[1].top_token_ids.append(1),
        "top_logprobs must have 1 entries, got 0",
    ),
    "many": (
        lambda d: d.logprobs[0].top_token_ids.extend(range(20)),
        "top_token_ids must have at most 20 entries, got 22",
    ),
    "nan": (lambda d: setattr(d.logprobs[0], "logprob", math.nan), r"logprob must be in \[-9999"),
    "positive": (
        lambda d: d.logprobs[0].top_logprobs.__setitem__(0, 0.5),
        r"top_logprobs must be in \[-9999.0, 0\], got 0.5",
    ),
}


@pytest.mark.parametrize("name", BAD_DELTAS)
def test_logprobs_of_a_delta_that_make_no_sense_are_refused(name: str) -> None:
    change, reason = BAD_DELTAS[name]
    encoded = encoder("logprobs_delta")(SAMPLES["logprobs_delta"][1])
    message = inference_pb2.GenerateStreamResponse.FromString(encoded)
    change(message.delta)
    with pytest.raises(InvalidMessageError, match=reason):
        event_from_pb(message)


def test_more_cached_tokens_than_prompt_tokens_are_refused() -> None:
    encoded = encoder("cached_finish")(SAMPLES["cached_finish"][1])
    message = inference_pb2.GenerateStreamResponse.FromString(encoded)
    message.finish_info.usage.cached_tokens = 49
    with pytest.raises(InvalidMessageError, match=r"cached_tokens must be in \[0, 48\], got 49"):
        event_from_pb(message)


BAD_REQUESTS: dict[str, tuple[inference_pb2.GenerateRequest, str]] = {
    "no prompt": (inference_pb2.GenerateRequest(), "one of text, token_ids and chat"),
    "empty text": (inference_pb2.GenerateRequest(text=""), "text must not be empty"),
    "empty ids": (
        inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenPrompt()),
        "token_ids must not be empty",
    ),
    "empty chat": (
        inference_pb2.GenerateRequest(chat=inference_pb2.ChatPrompt()),
        "messages must not be empty",
    ),
    "empty id": (inference_pb2.GenerateRequest(text="x", request_id=""), "request_id"),
    "empty stop": (
        inference_pb2.GenerateRequest(text="x", stopping={"stop": [""]}),
        "stop must not be empty",
    ),
    "many logprobs": (
        inference_pb2.GenerateRequest(text="x", top_logprobs=21),
        r"top_logprobs must be in \[0, 20\], got 21",
    ),
    "many stops": (
        inference_pb2.GenerateRequest(text="x", stopping={"stop": ["a"] * 65}),
        "at most 64 entries",
    ),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_bad_request_is_refused(name: str) -> None:
    message, reason = BAD_REQUESTS[name]
    with pytest.raises(InvalidMessageError, match=reason):
        request_from_pb(message)


def test_frames_without_a_message_are_refused() -> None:
    for decode in (
        codec.decode_drafter_message,
        codec.decode_verifier_message,
        codec.decode_sessions_request,
        codec.decode_sessions_message,
    ):
        with pytest.raises(InvalidMessageError, match="must hold"):
            decode(b"")
    with pytest.raises(InvalidMessageError, match="must hold"):
        event_from_pb(inference_pb2.GenerateStreamResponse())


def test_an_oversized_frame_is_refused_unread() -> None:
    with pytest.raises(InvalidMessageError, match="are allowed"):
        codec.decode_drafter_message(bytes(MAX_MESSAGE_BYTES + 1))


def test_a_value_that_the_contract_cannot_hold_is_the_callers_error() -> None:
    for options, name in (
        (SamplingOptions(top_k=-1), "top_k"),
        (SamplingOptions(seed=2**64), "seed"),
    ):
        with pytest.raises(InvalidRequestError, match=f"^{name} must be an integer in "):
            request_to_pb(GenerateRequest(prompt=TextPrompt("x"), sampling=options))


def test_absent_fields_of_a_plan_and_of_sampling_mean_the_documented_defaults() -> None:
    message = open_pb()
    message.open.spec.ClearField("plan")
    message.open.spec.ClearField("sampling")
    opening = codec.decode_sessions_request(message.SerializeToString())
    assert isinstance(opening, SessionOpen)
    spec = opening.spec
    assert (spec.plan.draft_tokens, spec.plan.top_k, spec.plan.proposal_timeout_ms) == (4, 1, 1000)
    assert (spec.sampling.temperature, spec.sampling.top_p) == (0.0, 1.0)


def test_a_receiver_checks_ids_and_size_against_its_own_bounds() -> None:
    proposals: Proposals = SAMPLES["proposals"][1]
    for vocab_size, max_nodes, sound in ((49152, 3, True), (49151, 3, False), (49152, 2, False)):
        found = valid_proposals(proposals, vocab_size=vocab_size, max_nodes=max_nodes)
        assert found.tolist() == [True, sound]


def test_decoded_drafts_are_owned_and_writable() -> None:
    decoded = codec.decode_drafter_message(codec.encode_drafter_message(SAMPLES["proposals"][1]))
    assert isinstance(decoded, Proposals)
    decoded.tokens[2] = 1
    assert TREE.tokens[0] == 11


def test_set_plan_names_a_session() -> None:
    message = control_pb2.SetPlanRequest.FromString(codec.encode_set_plan(SESSION, PLAN))
    message.session_id = ""
    with pytest.raises(InvalidMessageError, match="session_id"):
        codec.decode_set_plan(message.SerializeToString())


def test_a_move_names_a_drafter_or_says_that_there_is_none() -> None:
    nameless = control_pb2.SessionMove(handle=3, drafter_id="")
    message = control_pb2.SessionsRequest(move=nameless)
    with pytest.raises(InvalidMessageError, match="drafter_id"):
        codec.decode_sessions_request(message.SerializeToString())


def test_a_pool_request_names_a_drafter_by_a_bounded_address() -> None:
    for address in ("", "x" * 1025):
        with pytest.raises(InvalidMessageError, match="address"):
            address_from_pb(pool_pb2.RemoveDrafterRequest(address=address))


def test_a_seed_never_crosses_to_a_drafter() -> None:
    start = replace(SAMPLES["session_start"][1], sampling=SAMPLING)
    encoded = codec.encode_verifier_message(start)
    assert codec.decode_verifier_message(encoded).sampling == SAMPLING.for_drafter()
    message = exchange_pb2.ExchangeResponse.FromString(encoded)
    assert message.session_start.sampling.seed == 0
    message.session_start.sampling.ClearField("draft_key")
    with pytest.raises(InvalidMessageError, match="must bring a drafter's key"):
        codec.decode_verifier_message(message.SerializeToString())


def test_a_verifier_is_told_the_seed_itself() -> None:
    message = open_pb()
    sampling = message.open.spec.sampling
    sampling.seed, sampling.draft_key = 0, 5
    refused = codec.decode_sessions_request(message.SerializeToString())
    assert isinstance(refused, MalformedOpen)
    assert "must bring a seed" in refused.error.message


def test_thinking_budgets_are_within_the_bounds() -> None:
    good: dict[str, Any] = {"max_tokens": 1, "close_tag": "</a>", "close_ids": [1]}
    for change, why in (
        ({"max_tokens": (1 << 24) + 1}, "max_tokens must be"),
        ({"close_tag": ""}, "close_tag must not be empty"),
        ({"close_tag": "a" * 257}, "at most 256 bytes"),
        ({"close_ids": []}, "1 to 64 ids"),
        ({"close_ids": [1] * 65}, "at most 64 entries"),
        ({"close_ids": [1 << 24]}, "must be below"),
        ({"open_tag": "<a>"}, "1 to 64 ids"),
        ({"open_ids": [1]}, "1 to 64 ids"),
    ):
        bad = open_pb()
        bad.open.spec.thinking_budget.CopyFrom(control_pb2.ThinkingBudget(**(good | change)))
        opened = codec.decode_sessions_request(bad.SerializeToString())
        assert isinstance(opened, MalformedOpen)
        assert why in opened.error.message, change


def test_limits_of_ids_must_say_something_within_the_bounds() -> None:
    words = common_pb2.TokenSequence
    for limits, why in (
        (common_pb2.TokenLimits(), "must have allowed ids or bad words"),
        (common_pb2.TokenLimits(allowed_ids=[1 << 24]), "must be below"),
        (common_pb2.TokenLimits(allowed_ids=[1] * 65537), "at most 65536 entries"),
        (common_pb2.TokenLimits(bad_words=[words()]), "must be 1 to 64 ids"),
        (common_pb2.TokenLimits(bad_words=[words(token_ids=[1] * 65)]), "at most 64 entries"),
        (common_pb2.TokenLimits(bad_words=[words(token_ids=[1])] * 257), "at most 256 entries"),
    ):
        bad = open_pb()
        bad.open.spec.token_limits.CopyFrom(limits)
        opened = codec.decode_sessions_request(bad.SerializeToString())
        assert isinstance(opened, MalformedOpen)
        assert why in opened.error.message
    for sampling, why in (
        (inference_pb2.SamplingOptions(bad_words=[""]), "bad_words must not be empty"),
        (inference_pb2.SamplingOptions(bad_words=["é" * 129]), "at most 256 bytes"),
        (inference_pb2.SamplingOptions(bad_words=["a"] * 129), "at most 128 entries"),
        (inference_pb2.SamplingOptions(allowed_token_ids=[1] * 65537), "at most 65536 entries"),
    ):
        with pytest.raises(InvalidMessageError, match=why):
            request_from_pb(inference_pb2.GenerateRequest(text="x", sampling=sampling))


def test_the_form_of_an_answer_must_be_one_that_the_contract_knows() -> None:
    for empty in (common_pb2.StructuredOutput(), common_pb2.StructuredOutput(json_object=False)):
        request = inference_pb2.GenerateRequest(text="x", structured_output=empty)
        with pytest.raises(InvalidMessageError, match="must be one of json_schema"):
            request_from_pb(request)
    too_long = common_pb2.StructuredOutput(regex="é" * (MAX_STRUCTURE_BYTES // 2 + 1))
    with pytest.raises(InvalidMessageError, match="at most 262144 bytes, got 262146"):
        request_from_pb(inference_pb2.GenerateRequest(text="x", structured_output=too_long))
    bad = open_pb()
    bad.open.spec.structured_output.grammar = ""
    opened = codec.decode_sessions_request(bad.SerializeToString())
    assert isinstance(opened, MalformedOpen)
    assert "needs a text" in opened.error.message


@pytest.mark.parametrize(
    ("decode", "name"),
    [(codec.decode_attach, "AttachRequest"), (codec.decode_detach, "DetachRequest")],
)
def test_garbage_is_called_by_the_name_of_its_request(
    decode: Callable[[bytes], str], name: str
) -> None:
    with pytest.raises(InvalidMessageError, match=f"3 bytes are not a {name}"):
        decode(b"\xff\xff\xff")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"drafter_id": ""}, "drafter_id must not be empty"),
        ({"drafter_id": "d" * 257}, "drafter_id must be at most 256 bytes"),
        ({"memory": 0}, r"memory must be one of \[1, 2\], got 0"),
        ({"memory": 3}, r"memory must be one of \[1, 2\], got 3"),
        ({"draft_length": 65}, r"draft_length must be in \[0, 64\]"),
        ({"idle_us_p50": math.nan}, "idle_us_p50 must be finite"),
        ({"idle_us_p50": -1.0}, "idle_us_p50 must be finite and >= 0"),
        ({"idle_rows": 65537}, r"idle_rows must be in \[0, 65536\]"),
    ],
)
def test_an_exchange_between_devices_is_told_within_its_bounds(
    change: dict[str, Any], complaint: str
) -> None:
    info = control_pb2.VerifierServiceGetInfoResponse.FromString(
        encoder("exchange_verifier_info")(SAMPLES["exchange_verifier_info"][1])
    )
    server = inference_pb2.GetServerInfoResponse.FromString(
        encoder("exchange_server_info")(SAMPLES["exchange_server_info"][1])
    )
    for message in (info.device_exchange, server.verifiers[0].device_exchange):
        for field, value in change.items():
            setattr(message, field, value)
    with pytest.raises(InvalidMessageError, match=complaint):
        codec.decode_verifier_info(info.SerializeToString())
    with pytest.raises(InvalidMessageError, match=complaint):
        server_info_from_pb(server)
