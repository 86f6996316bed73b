"""Each way in which a peer may be wrong is refused with a message that says so."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from outrider.errors import InvalidMessageError, InvalidRequestError
from outrider.spec.tree import DraftTree
from outrider.wire import codec
from outrider.wire.exchange_codec import validate_proposal
from outrider.wire.inference import GenerateRequest, SamplingOptions, TextPrompt
from outrider.wire.inference_codec import event_from_pb, request_from_pb, request_to_pb
from outrider.wire.limits import MAX_MESSAGE_BYTES, MAX_NODES
from outrider.wire.messages import Proposal
from outrider.wire.v1 import common_pb2, control_pb2, exchange_pb2, inference_pb2
from tests.wire.samples import PLAN, SAMPLES, SAMPLING, SESSION, TREE


def int32(*values: int) -> bytes:
    return np.array(values, dtype="<i4").tobytes()


def float32(*values: float) -> bytes:
    return np.array(values, dtype="<f4").tobytes()


def proposal_pb() -> exchange_pb2.ExchangeRequest:
    encoded = codec.encode_drafter_message(SAMPLES["proposal"][1])
    return exchange_pb2.ExchangeRequest.FromString(encoded)


def verdict_pb() -> exchange_pb2.ExchangeResponse:
    encoded = codec.encode_verifier_message(SAMPLES["verdict"][1])
    return exchange_pb2.ExchangeResponse.FromString(encoded)


def spec_pb() -> control_pb2.OpenSessionRequest:
    encoded = codec.encode_session_spec(SAMPLES["session_spec"][1])
    return control_pb2.OpenSessionRequest.FromString(encoded)


Change = Callable[[Any], object]

BAD_PROPOSALS: dict[str, tuple[Change, str]] = {
    "no session": (lambda p: setattr(p, "session_id", ""), "session_id must not be empty"),
    "long session": (lambda p: setattr(p, "session_id", "x" * 300), "at most 256 bytes"),
    "no prefix": (lambda p: setattr(p, "prefix_len", 0), r"prefix_len must be in \[1, "),
    "odd bytes": (lambda p: setattr(p.tree, "tokens", b"\0" * 5), "not a multiple of 4"),
    "many nodes": (
        lambda p: setattr(p.tree, "tokens", int32(*range(MAX_NODES + 1))),
        "at most 256 entries",
    ),
    "lengths": (lambda p: setattr(p.tree, "parents", int32(-1)), "has shape"),
    "negative id": (lambda p: setattr(p.tree, "tokens", int32(-1, 12, 49151)), "token ids"),
    "parent later": (lambda p: setattr(p.tree, "parents", int32(-1, 2, 0)), "earlier node"),
    "parent self": (lambda p: setattr(p.tree, "parents", int32(0, -1, 0)), "earlier node"),
    "parent below root": (lambda p: setattr(p.tree, "parents", int32(-2, -1, 0)), "earlier node"),
    "nan": (lambda p: setattr(p.tree, "logprobs", float32(math.nan, -1, -1)), "log-probs"),
    "infinite": (
        lambda p: setattr(p.tree, "logprobs", float32(-math.inf, -1, -math.inf)),
        "finite",
    ),
    "positive": (lambda p: setattr(p.tree, "logprobs", float32(0.5, -1.5, -0.75)), "log-probs"),
    "rising": (lambda p: setattr(p.tree, "logprobs", float32(-0.25, -1.5, -0.1)), "log-probs"),
    "law offsets": (lambda p: setattr(p.law, "offsets", int32(0, 2, 3)), "offsets"),
    "law falls": (lambda p: setattr(p.law, "offsets", int32(0, 3, 2, 3, 3)), "offsets"),
    "law counts": (lambda p: setattr(p.law, "counts", b"\0\0" * 3), "counts must be >= 1"),
    "law order": (lambda p: setattr(p.law, "ids", int32(12, 11, 49151)), "strictly increase"),
    "law misses a child": (lambda p: setattr(p.law, "ids", int32(11, 13, 49151)), "draft law"),
}


@pytest.mark.parametrize("name", BAD_PROPOSALS)
def test_a_bad_proposal_is_refused(name: str) -> None:
    change, reason = BAD_PROPOSALS[name]
    message = proposal_pb()
    change(message.proposal)
    with pytest.raises(InvalidMessageError, match=reason):
        codec.decode_drafter_message(message.SerializeToString())


BAD_VERDICTS: dict[str, tuple[Change, str]] = {
    "negative id": (lambda v: setattr(v, "tokens", int32(-1)), "verdict.tokens"),
    "start": (lambda v: setattr(v, "start", 2**31), "start must be"),
    "dtype": (lambda v: setattr(v.features, "dtype", 99), "dtype 99 is unknown"),
    "integer features": (
        lambda v: setattr(v.features, "dtype", common_pb2.TENSOR_DTYPE_UINT16),
        "floating point",
    ),
    "size": (lambda v: setattr(v.features, "data", b"\0" * 7), "has 8 bytes, got 7"),
    "overflow": (lambda v: v.features.shape.extend([2**31, 2**31]), "bytes, got 8"),
    "rank": (lambda v: v.features.shape.extend([1, 1, 1]), "at most 4 dimensions"),
    "shape": (lambda v: v.features.shape.extend([1]), r"shape \[m, H\]"),
    "node order": (lambda v: v.accepted_nodes.extend([1]), "must increase"),
    "node range": (lambda v: v.accepted_nodes.extend([256]), "below 256"),
    "nodes": (lambda v: v.accepted_nodes.extend(range(3, 300)), "at most 256 entries"),
}


@pytest.mark.parametrize("name", BAD_VERDICTS)
def test_a_bad_verdict_is_refused(name: str) -> None:
    change, reason = BAD_VERDICTS[name]
    message = verdict_pb()
    change(message.verdict)
    with pytest.raises(InvalidMessageError, match=reason):
        codec.decode_verifier_message(message.SerializeToString())


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
    "drafter": (lambda s: setattr(s, "drafter_id", ""), "drafter_id must not be empty"),
}


@pytest.mark.parametrize("name", BAD_SPECS)
def test_a_bad_session_spec_is_refused(name: str) -> None:
    change, reason = BAD_SPECS[name]
    message = spec_pb()
    change(message)
    with pytest.raises(InvalidMessageError, match=reason):
        codec.decode_session_spec(message.SerializeToString())


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
        codec.decode_session_message,
    ):
        with pytest.raises(InvalidMessageError, match="must hold"):
            decode(b"")
    with pytest.raises(InvalidMessageError, match="must hold"):
        event_from_pb(inference_pb2.GenerateStreamResponse())


def test_an_oversized_frame_is_refused_unread() -> None:
    with pytest.raises(InvalidMessageError, match="are allowed"):
        codec.decode_drafter_message(bytes(MAX_MESSAGE_BYTES + 1))


def test_a_value_that_the_contract_cannot_hold_is_the_callers_error() -> None:
    for options in (SamplingOptions(top_k=-1), SamplingOptions(seed=2**64)):
        with pytest.raises(InvalidRequestError, match="request: "):
            request_to_pb(GenerateRequest(prompt=TextPrompt("x"), sampling=options))


def test_absent_fields_of_a_plan_and_of_sampling_mean_the_documented_defaults() -> None:
    message = spec_pb()
    message.ClearField("plan")
    message.ClearField("sampling")
    spec = codec.decode_session_spec(message.SerializeToString())
    assert (spec.plan.draft_tokens, spec.plan.top_k, spec.plan.patience_ms) == (4, 1, 1000)
    assert (spec.sampling.temperature, spec.sampling.top_p) == (0.0, 1.0)


def test_a_receiver_checks_ids_and_size_against_its_own_bounds() -> None:
    proposal: Proposal = SAMPLES["proposal"][1]
    validate_proposal(proposal, vocab_size=49152, max_nodes=3)
    with pytest.raises(InvalidMessageError, match=r"\[0, 49151\)"):
        validate_proposal(proposal, vocab_size=49151, max_nodes=3)
    with pytest.raises(InvalidMessageError, match="at most 2"):
        validate_proposal(proposal, vocab_size=49152, max_nodes=2)


def test_decoded_arrays_are_owned_and_writable() -> None:
    decoded = codec.decode_drafter_message(codec.encode_drafter_message(SAMPLES["proposal"][1]))
    assert isinstance(decoded, Proposal)
    decoded.tree.tokens[0] = 1
    assert isinstance(decoded.tree, DraftTree) and TREE.tokens[0] == 11


def test_set_plan_names_a_session() -> None:
    message = control_pb2.SetPlanRequest.FromString(codec.encode_set_plan(SESSION, PLAN))
    message.session_id = ""
    with pytest.raises(InvalidMessageError, match="session_id"):
        codec.decode_set_plan(message.SerializeToString())


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
    spec = spec_pb()
    spec.sampling.seed, spec.sampling.draft_key = 0, 5
    with pytest.raises(InvalidMessageError, match="must bring a seed"):
        codec.decode_session_spec(spec.SerializeToString())
