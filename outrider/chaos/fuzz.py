"""Decoder fuzzer: malformed frames must yield a typed error or a message, nothing else."""

from __future__ import annotations

import random
import struct
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from outrider.errors import InvalidMessageError, InvalidRequestError
from outrider.wire import (
    codec,
    inference_codec,
    inference_response_codec,
    pool_codec,
    server_info_codec,
)
from outrider.wire.v1 import control_pb2, exchange_pb2, inference_pb2, pool_pb2

MAX_DECODE_S = 0.5
"""Maximum processor time, in seconds, of decoding one frame of at most `MAX_FRAME_BYTES`. If a
frame took longer, a peer could use it for a denial-of-service attack."""
MAX_FRAME_BYTES = 1 << 16
_BASES = 400
_FRAMES_A_BASE = 200
"""Number of fuzzed frames after which one of the base frames is replaced."""
_DEPTH = 4

Decode = Callable[[bytes], object]


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder of one kind of frame, and the port on which such frames arrive."""

    port: str
    """Name of the port, such as `router`."""
    name: str
    kind: type[Message]
    """Message type that a valid frame holds."""
    decode: Decode


def _through(kind: Any, from_pb: Callable[[Any], object]) -> Decode:
    return lambda data: from_pb(kind.FromString(data))


def _router(name: str, kind: Any, from_pb: Callable[[Any], object]) -> Decoder:
    return Decoder("router", name, kind, _through(kind, from_pb))


def _client(name: str, kind: Any, from_pb: Callable[[Any], object]) -> Decoder:
    return Decoder("client", name, kind, _through(kind, from_pb))


DECODERS: tuple[Decoder, ...] = (
    _router("Generate", inference_pb2.GenerateRequest, inference_codec.request_from_pb),
    _router(
        "GenerateStream",
        inference_pb2.GenerateStreamRequest,
        inference_codec.stream_request_from_pb,
    ),
    _router("ResumeStream", inference_pb2.ResumeStreamRequest, inference_codec.position_from_pb),
    _router("Abort", inference_pb2.AbortRequest, server_info_codec.abort_request_from_pb),
    Decoder(
        "pool",
        "AddDrafter",
        pool_pb2.AddDrafterRequest,
        _through(pool_pb2.AddDrafterRequest, pool_codec.address_from_pb),
    ),
    Decoder(
        "pool",
        "RemoveDrafter",
        pool_pb2.RemoveDrafterRequest,
        _through(pool_pb2.RemoveDrafterRequest, pool_codec.address_from_pb),
    ),
    Decoder(
        "verifier sessions",
        "Sessions",
        control_pb2.SessionsRequest,
        codec.decode_sessions_request,
    ),
    Decoder("verifier control", "SetPlan", control_pb2.SetPlanRequest, codec.decode_set_plan),
    Decoder(
        "verifier control",
        "CloseSession",
        control_pb2.CloseSessionRequest,
        codec.decode_close_session,
    ),
    Decoder(
        "verifier exchange",
        "Exchange",
        exchange_pb2.ExchangeRequest,
        codec.decode_drafter_messages,
    ),
    Decoder(
        "drafter exchange",
        "Exchange",
        exchange_pb2.ExchangeResponse,
        codec.decode_verifier_messages,
    ),
    Decoder("drafter control", "Attach", control_pb2.AttachRequest, codec.decode_attach),
    Decoder("drafter control", "Detach", control_pb2.DetachRequest, codec.decode_detach),
    Decoder(
        "router's peers", "Sessions", control_pb2.SessionsResponse, codec.decode_sessions_message
    ),
    Decoder(
        "router's peers",
        "VerifierInfo",
        control_pb2.VerifierServiceGetInfoResponse,
        codec.decode_verifier_info,
    ),
    Decoder(
        "router's peers",
        "DrafterInfo",
        control_pb2.DrafterServiceGetInfoResponse,
        codec.decode_drafter_info,
    ),
    _client("event", inference_pb2.GenerateStreamResponse, inference_response_codec.event_from_pb),
    _client(
        "resumed",
        inference_pb2.ResumeStreamResponse,
        inference_response_codec.resumed_event_from_pb,
    ),
    _client("result", inference_pb2.GenerateResponse, inference_response_codec.result_from_pb),
    _client("info", inference_pb2.GetServerInfoResponse, server_info_codec.server_info_from_pb),
    _client("models", inference_pb2.ListModelsResponse, server_info_codec.models_from_pb),
)
PORTS: tuple[str, ...] = tuple(dict.fromkeys(decoder.port for decoder in DECODERS))


@dataclass(slots=True)
class FuzzReport:
    """Result of a fuzzing run."""

    frames: Counter[str] = field(default_factory=Counter)
    """Number of frames that were fed to the decoders of each port, by name of the port."""
    accepted: Counter[str] = field(default_factory=Counter)
    """Number of these frames that were decoded into a message, by name of the port."""
    failures: list[str] = field(default_factory=list)
    """Frames, in hexadecimal, that raised an untyped error or took too long."""
    slowest_s: float = 0.0

    def add(self, other: FuzzReport) -> None:
        """Add the counts and failures of another report."""
        self.frames.update(other.frames)
        self.accepted.update(other.accepted)
        self.failures += other.failures
        self.slowest_s = max(self.slowest_s, other.slowest_s)

    def __str__(self) -> str:
        lines = [
            f"{port}: {count} frames, {self.accepted[port]} read as messages"
            for port, count in self.frames.items()
        ]
        lines.append(f"slowest frame: {1000 * self.slowest_s:.1f} ms")
        return "\n".join([*lines, *(f"FAILURE {failure}" for failure in self.failures)])


def fuzz_port(port: str, frames: int, *, seed: int, corpus: Sequence[bytes] = ()) -> FuzzReport:
    """Feed `frames` malformed frames to the decoders of a port and return the results.

    `corpus` holds valid frames of any kind, which are changed into malformed ones.
    """
    report, rng = FuzzReport(), random.Random(f"{port}-{seed}")
    decoders = [decoder for decoder in DECODERS if decoder.port == port]
    share = -(-frames // len(decoders))
    for decoder in decoders:
        honest = [frame for frame in corpus if can_read(decoder, frame)]
        _fuzz(decoder, share, rng, honest, report)
    return report


def can_read(decoder: Decoder, frame: bytes) -> bool:
    """Return whether a decoder accepts a frame. Errors other than InvalidRequestError and
    DecodeError are raised."""
    try:
        decoder.decode(frame)
    except (InvalidRequestError, DecodeError):
        return False
    return True


def _fuzz(
    decoder: Decoder, frames: int, rng: random.Random, honest: list[bytes], report: FuzzReport
) -> None:
    bases = [random_frame(decoder.kind, rng) for _ in range(_BASES)]
    accepted = 0
    for number in range(frames):
        if number % _FRAMES_A_BASE == 0:
            bases[rng.randrange(_BASES)] = random_frame(decoder.kind, rng)
        base = rng.choice(honest if honest and rng.random() < 0.5 else bases)
        frame = mutated(base, rng, bases)
        began = time.thread_time()
        try:
            accepted += _is_message(decoder.decode(frame))
        except (InvalidRequestError, DecodeError):
            pass
        except Exception as error:
            report.failures.append(
                f"{decoder.port} {decoder.name}: {type(error).__name__}: {error}: {frame.hex()}"
            )
        took = time.thread_time() - began
        if took > MAX_DECODE_S:
            report.failures.append(f"{decoder.name}: {took:.2f} s for {frame.hex()}")
        report.slowest_s = max(report.slowest_s, took)
    report.frames[decoder.port] += frames
    report.accepted[decoder.port] += accepted


def _is_message(read: object) -> bool:
    """Return whether a whole frame was decoded. In a decoded bundle, an InvalidMessageError stands
    in place of each malformed message."""
    return not (isinstance(read, list) and any(isinstance(m, InvalidMessageError) for m in read))


def mutated(base: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    """Return a variant of `base` in which bits or bytes are changed, cut, duplicated, or replaced
    by the end of one of `others`."""
    frame = bytearray(base)
    for _ in range(rng.choice((0, 1, 1, 2, 5))):
        at = rng.randrange(len(frame) + 1)
        to = min(len(frame), at + rng.choice((1, 2, 4, 8, 32)))
        match rng.randrange(7):
            case 0 if frame:
                frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
            case 1:
                frame[at:to] = rng.randbytes(to - at)
            case 2:
                del frame[at:to]
            case 3:
                frame[at:at] = frame[at:to] * rng.randint(1, 8)
            case 4:
                frame[at:at] = rng.randbytes(rng.randint(1, 12))
            case 5:
                frame[at:to] = struct.pack("<i", rng.choice(_NUMBERS) & 0x7FFFFFFF)[: to - at]
            case _:
                other = rng.choice(others)
                frame[at:] = other[rng.randrange(len(other) + 1) :]
    return bytes(frame[:MAX_FRAME_BYTES])


_NUMBERS = (0, 1, 2, 3, 7, 255, 256, 65535, 1 << 20, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1)
_FLOATS = (0.0, -0.0, 0.5, -1.0, 1e30, float("inf"), float("-inf"), float("nan"))
_STRINGS = ("", "a", "req-1", "127.0.0.1:1", "\x00", "\u65e5" * 9, "x" * 300)


def random_frame(kind: type[Message], rng: random.Random) -> bytes:
    """Return a frame with a message of type `kind` whose fields have random values. It can be
    parsed, but its fields do not fit together."""
    message = kind()
    _fill(message, kind.DESCRIPTOR, rng, _DEPTH)
    return message.SerializeToString()


def _fill(message: Any, descriptor: Any, rng: random.Random, depth: int) -> None:
    fields = list(descriptor.fields)
    rng.shuffle(fields)  # of a oneof, the last one counts
    for one in fields:
        if rng.random() < 0.35:
            continue
        if one.type == FieldDescriptor.TYPE_MESSAGE:
            if depth == 0:
                continue
            for _ in range(rng.randint(0, 3) if one.is_repeated else 1):
                target = getattr(message, one.name)
                inner = target.add() if one.is_repeated else target
                inner.SetInParent() if not one.is_repeated else None
                _fill(inner, one.message_type, rng, depth - 1)
        elif one.is_repeated:
            values = [_scalar(one, rng) for _ in range(rng.randint(0, 5))]
            getattr(message, one.name).extend(values)
        else:
            setattr(message, one.name, _scalar(one, rng))


def _scalar(one: FieldDescriptor, rng: random.Random) -> object:
    """Return a random value that fits the type of a field."""
    match one.cpp_type:
        case FieldDescriptor.CPPTYPE_BOOL:
            return rng.random() < 0.5
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return rng.choice(_FLOATS)
        case FieldDescriptor.CPPTYPE_ENUM:
            return rng.randint(0, 9)
        case FieldDescriptor.CPPTYPE_STRING if one.type == FieldDescriptor.TYPE_STRING:
            return rng.choice(_STRINGS)
        case FieldDescriptor.CPPTYPE_STRING:
            return rng.randbytes(rng.choice((0, 1, 4, 8, 16, 24, 64)))
    number = rng.choice(_NUMBERS)
    bits = 64 if one.cpp_type in _WIDE else 32
    number &= (1 << bits) - 1
    signed = one.cpp_type in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64)
    return number - (1 << bits) if signed and number >> (bits - 1) else number


_WIDE = (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)
