"""Exchange messages to frames and back; decoding checks all that a peer could get wrong.

What only the receiver knows (its vocabulary, the session's bounds) is checked by
`validate_proposal`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from outrider.errors import InvalidMessageError
from outrider.ids import DrafterId, SessionId, VerifierId
from outrider.spec.law import DraftLaw, validate_law
from outrider.spec.tree import DraftTree, validate_tree
from outrider.wire.bundles import Encoded, join, refuse_bundle, split
from outrider.wire.checks import count, fail, number, parse, text
from outrider.wire.common_codec import (
    LAYOUTS,
    LAYOUTS_FROM_PB,
    METHODS,
    drafter_sampling_from_pb,
    known,
    methods_from_pb,
    plan_from_pb,
    plan_to_pb,
    sampling_to_pb,
)
from outrider.wire.limits import (
    MAX_BUNDLE_BYTES,
    MAX_FEATURE_WIDTH,
    MAX_LAW_ENTRIES,
    MAX_NODES,
    MAX_SEQUENCE_LEN,
    MAX_VOCAB_SIZE,
)
from outrider.wire.messages import (
    DrafterMessage,
    Heartbeat,
    Hello,
    PlanChange,
    Proposal,
    SessionEnd,
    SessionStart,
    TensorDtype,
    Verdict,
    VerifierMessage,
    Welcome,
    WireTensor,
)
from outrider.wire.tensors import FLOAT32, INT32, UINT16, pack, tensor_from_pb, tensor_to_pb, unpack
from outrider.wire.v1 import common_pb2
from outrider.wire.v1 import exchange_pb2 as pb

MessageT = TypeVar("MessageT")

_FEATURE_DTYPES = (TensorDtype.FLOAT32, TensorDtype.FLOAT16, TensorDtype.BFLOAT16)


def encode_drafter_message(message: DrafterMessage) -> bytes:
    """A drafter's message as bytes."""
    match message:
        case Proposal():
            frame = pb.ExchangeRequest(proposal=_proposal_to_pb(message))
        case Heartbeat():
            frame = pb.ExchangeRequest(heartbeat=common_pb2.Heartbeat(sequence=message.sequence))
        case Hello():
            frame = pb.ExchangeRequest(hello=_hello_to_pb(message))
    return frame.SerializeToString(deterministic=True)


def encode_drafter_messages(
    messages: Sequence[DrafterMessage], *, max_bytes: int = MAX_BUNDLE_BYTES
) -> list[bytes]:
    """A drafter's messages as frames of at most `max_bytes`; a larger message is one alone."""
    return join([encode_drafter_message(message) for message in messages], max_bytes=max_bytes)


def decode_drafter_messages(frame: Encoded) -> list[DrafterMessage | InvalidMessageError]:
    """The drafter's messages in a frame, in order; the error in the place of a malformed one.

    A frame that cannot be told into messages is one malformed message.
    """
    return _decode_all(frame, _drafter_message)


def decode_drafter_message(data: Encoded) -> DrafterMessage:
    """The drafter's message in `data`; InvalidMessageError if there is none, or a bundle."""
    refuse_bundle(data)
    return _drafter_message(data)


def _decode_all(
    frame: Encoded, decode: Callable[[Encoded], MessageT]
) -> list[MessageT | InvalidMessageError]:
    try:
        members = split(frame)
    except InvalidMessageError as error:
        return [error]
    messages: list[MessageT | InvalidMessageError] = []
    for member in members:
        try:
            if member is not frame:
                refuse_bundle(member)
            messages.append(decode(member))
        except InvalidMessageError as error:
            messages.append(error)
    return messages


def _drafter_message(data: Encoded) -> DrafterMessage:
    frame = parse(pb.ExchangeRequest, data)
    match frame.WhichOneof("message"):
        case "proposal":
            return _proposal_from_pb(frame.proposal)
        case "heartbeat":
            return Heartbeat(frame.heartbeat.sequence)
        case "hello":
            return _hello_from_pb(frame.hello)
        case _:
            fail("a drafter's message must hold hello, proposal or heartbeat")


def encode_verifier_message(message: VerifierMessage) -> bytes:
    """A verifier's message as bytes."""
    match message:
        case Verdict():
            frame = pb.ExchangeResponse(verdict=_verdict_to_pb(message))
        case Heartbeat():
            frame = pb.ExchangeResponse(heartbeat=common_pb2.Heartbeat(sequence=message.sequence))
        case SessionStart():
            frame = pb.ExchangeResponse(session_start=_session_start_to_pb(message))
        case SessionEnd():
            frame = pb.ExchangeResponse(session_end=pb.SessionEnd(session_id=message.session_id))
        case PlanChange():
            frame = pb.ExchangeResponse(
                plan_change=pb.PlanChange(
                    session_id=message.session_id, plan=plan_to_pb(message.plan)
                )
            )
        case Welcome():
            frame = pb.ExchangeResponse(
                welcome=pb.Welcome(
                    protocol_version=message.protocol_version,
                    verifier_id=message.verifier_id,
                    incarnation=message.incarnation,
                )
            )
    return frame.SerializeToString(deterministic=True)


def encode_verifier_messages(
    messages: Sequence[VerifierMessage], *, max_bytes: int = MAX_BUNDLE_BYTES
) -> list[bytes]:
    """A verifier's messages as frames of at most `max_bytes`; a larger message is one alone."""
    return join([encode_verifier_message(message) for message in messages], max_bytes=max_bytes)


def decode_verifier_messages(frame: Encoded) -> list[VerifierMessage | InvalidMessageError]:
    """Like `decode_drafter_messages`, of a verifier."""
    return _decode_all(frame, _verifier_message)


def decode_verifier_message(data: Encoded) -> VerifierMessage:
    """The verifier's message in `data`; InvalidMessageError if there is none, or a bundle."""
    refuse_bundle(data)
    return _verifier_message(data)


def _verifier_message(data: Encoded) -> VerifierMessage:
    frame = parse(pb.ExchangeResponse, data)
    match frame.WhichOneof("message"):
        case "verdict":
            return _verdict_from_pb(frame.verdict)
        case "heartbeat":
            return Heartbeat(frame.heartbeat.sequence)
        case "session_start":
            return _session_start_from_pb(frame.session_start)
        case "session_end":
            return SessionEnd(session_id=_session_id(frame.session_end.session_id))
        case "plan_change":
            return PlanChange(
                session_id=_session_id(frame.plan_change.session_id),
                plan=plan_from_pb(frame.plan_change.plan),
            )
        case "welcome":
            return Welcome(
                protocol_version=frame.welcome.protocol_version,
                verifier_id=VerifierId(text(frame.welcome.verifier_id, "verifier_id")),
                incarnation=text(frame.welcome.incarnation, "incarnation", empty=True),
            )
        case _:
            fail("a verifier's message must hold exactly one message")


def validate_proposal(proposal: Proposal, *, vocab_size: int, max_nodes: int) -> None:
    """What the receiver alone can check: ids below its vocabulary, nodes within the plan."""
    validate_tree(proposal.tree, vocab_size=vocab_size, max_nodes=max_nodes)
    if proposal.law is not None:
        validate_law(proposal.law, proposal.tree, vocab_size)


def _session_id(value: str) -> SessionId:
    return SessionId(text(value, "session_id"))


def _hello_to_pb(hello: Hello) -> pb.Hello:
    return pb.Hello(
        protocol_version=hello.protocol_version,
        drafter_id=hello.drafter_id,
        incarnation=hello.incarnation,
        vocab_size=hello.vocab_size,
        tokenizer_hash=hello.tokenizer_hash,
        methods=[METHODS[method] for method in hello.methods],
        feature_layout=LAYOUTS[hello.feature_layout],
        feature_fingerprint=hello.feature_fingerprint,
    )


def _hello_from_pb(message: pb.Hello) -> Hello:
    return Hello(
        protocol_version=message.protocol_version,
        drafter_id=DrafterId(text(message.drafter_id, "drafter_id")),
        incarnation=text(message.incarnation, "incarnation", empty=True),
        vocab_size=number(message.vocab_size, "vocab_size", low=1, high=MAX_VOCAB_SIZE),
        tokenizer_hash=text(message.tokenizer_hash, "tokenizer_hash", empty=True),
        methods=methods_from_pb(message.methods),
        feature_layout=known(LAYOUTS_FROM_PB, message.feature_layout, "feature_layout"),
        feature_fingerprint=text(message.feature_fingerprint, "feature_fingerprint", empty=True),
    )


def _proposal_to_pb(proposal: Proposal) -> pb.Proposal:
    tree, law = proposal.tree, proposal.law
    return pb.Proposal(
        session_id=proposal.session_id,
        prefix_digest=proposal.prefix_digest,
        prefix_len=proposal.prefix_len,
        tree=pb.DraftTree(
            tokens=pack(tree.tokens, INT32),
            parents=pack(tree.parents, INT32),
            logprobs=pack(tree.logprobs, FLOAT32),
        ),
        law=None
        if law is None
        else pb.DraftLaw(
            offsets=pack(law.offsets, INT32),
            ids=pack(law.ids, INT32),
            counts=pack(law.counts, UINT16),
        ),
        draft_us=proposal.draft_us,
    )


def _proposal_from_pb(message: pb.Proposal) -> Proposal:
    tree = _tree_from_pb(message.tree)
    law = _law_from_pb(message.law, tree) if message.HasField("law") else None
    return Proposal(
        session_id=_session_id(message.session_id),
        prefix_digest=message.prefix_digest,
        prefix_len=number(message.prefix_len, "prefix_len", low=1, high=MAX_SEQUENCE_LEN),
        tree=tree,
        law=law,
        draft_us=message.draft_us,
    )


def _ints(data: bytes, name: str, *, max_len: int) -> NDArray[np.int32]:
    return cast("NDArray[np.int32]", unpack(data, INT32, name, max_len=max_len))


def _tree_from_pb(message: pb.DraftTree) -> DraftTree:
    tree = DraftTree(
        tokens=_ints(message.tokens, "tree.tokens", max_len=MAX_NODES),
        parents=_ints(message.parents, "tree.parents", max_len=MAX_NODES),
        logprobs=cast(
            "NDArray[np.float32]",
            unpack(message.logprobs, FLOAT32, "tree.logprobs", max_len=MAX_NODES),
        ),
    )
    validate_tree(tree, vocab_size=MAX_VOCAB_SIZE, max_nodes=MAX_NODES)
    # A valid tree's are neither NaN nor positive.
    if -math.inf in tree.logprobs.tolist():
        fail("tree.logprobs must be finite")
    return tree


def _law_from_pb(message: pb.DraftLaw, tree: DraftTree) -> DraftLaw:
    law = DraftLaw(
        offsets=_ints(message.offsets, "law.offsets", max_len=MAX_NODES + 2),
        ids=_ints(message.ids, "law.ids", max_len=MAX_LAW_ENTRIES),
        counts=cast(
            "NDArray[np.uint16]",
            unpack(message.counts, UINT16, "law.counts", max_len=MAX_LAW_ENTRIES),
        ),
    )
    validate_law(law, tree, MAX_VOCAB_SIZE)
    return law


def _session_start_to_pb(start: SessionStart) -> pb.SessionStart:
    return pb.SessionStart(
        session_id=start.session_id,
        epoch=start.epoch,
        plan=plan_to_pb(start.plan),
        sampling=sampling_to_pb(start.sampling.for_drafter()),
        max_len=start.max_len,
        prompt_len=start.prompt_len,
    )


def _session_start_from_pb(message: pb.SessionStart) -> SessionStart:
    return SessionStart(
        session_id=_session_id(message.session_id),
        epoch=message.epoch,
        plan=plan_from_pb(message.plan),
        sampling=drafter_sampling_from_pb(message.sampling),
        max_len=number(message.max_len, "max_len", high=MAX_SEQUENCE_LEN),
        prompt_len=number(message.prompt_len, "prompt_len", high=MAX_SEQUENCE_LEN),
    )


def _verdict_to_pb(verdict: Verdict) -> pb.Verdict:
    return pb.Verdict(
        session_id=verdict.session_id,
        epoch=verdict.epoch,
        round_id=verdict.round_id,
        start=verdict.start,
        tokens=pack(verdict.tokens, INT32),
        prefix_digest=verdict.prefix_digest,
        feature_start=verdict.feature_start,
        features=None if verdict.features is None else tensor_to_pb(verdict.features),
        draft_wanted=verdict.draft_wanted,
        accepted_nodes=verdict.accepted_nodes,
        proposal_digest=verdict.proposal_digest,
    )


def _verdict_from_pb(message: pb.Verdict) -> Verdict:
    tokens = _ints(message.tokens, "verdict.tokens", max_len=MAX_SEQUENCE_LEN)
    # Read without a sign, a negative id is too large.
    if len(tokens) and tokens.view(np.uint32).max() >= MAX_VOCAB_SIZE:
        fail(f"verdict.tokens must be in [0, {MAX_VOCAB_SIZE})")
    return Verdict(
        session_id=_session_id(message.session_id),
        epoch=message.epoch,
        round_id=message.round_id,
        start=number(message.start, "start", high=MAX_SEQUENCE_LEN),
        tokens=tokens,
        prefix_digest=message.prefix_digest,
        feature_start=number(message.feature_start, "feature_start", high=MAX_SEQUENCE_LEN),
        features=_features_from_pb(message.features) if message.HasField("features") else None,
        draft_wanted=message.draft_wanted,
        accepted_nodes=_accepted_nodes(message),
        proposal_digest=message.proposal_digest,
    )


def _features_from_pb(message: common_pb2.Tensor) -> WireTensor:
    features = tensor_from_pb(message)
    if features.dtype not in _FEATURE_DTYPES:
        fail(f"features must be floating point, got {features.dtype}")
    if features.data.ndim != 2:
        fail(f"features must have shape [m, H], got {features.data.shape}")
    rows, width = features.data.shape
    number(rows, "feature rows", high=MAX_SEQUENCE_LEN)
    number(width, "feature width", low=1, high=MAX_FEATURE_WIDTH)
    return features


def _accepted_nodes(message: pb.Verdict) -> tuple[int, ...]:
    count(message.accepted_nodes, "accepted_nodes", high=MAX_NODES)
    nodes = tuple(message.accepted_nodes)
    # A path: parents precede children, so node indices grow along it.
    if nodes and (nodes[-1] >= MAX_NODES or any(a >= b for a, b in pairwise(nodes))):
        fail(f"accepted_nodes must increase and be below {MAX_NODES}, got {nodes}")
    return nodes
