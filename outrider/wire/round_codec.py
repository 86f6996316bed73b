"""Codec of `Verdicts` and `Proposals` that avoids copies of arrays.

Both are protobuf messages (`exchange.proto`) whose arrays are `bytes` fields. This module reads and
writes their outermost fields itself. Encoding copies each array once, except for features, which it
does not copy. Decoded arrays are views of the received bytes unless stated otherwise.

In shapes, S is the number of entries of a message. Decoding only checks that the lengths of all
arrays agree. The receiver checks the individual entries, because it knows its vocabulary and the
session that an invalid entry belongs to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from outrider.spec.mix64 import MASK64
from outrider.spec.tree import chain_parents
from outrider.wire.arrays import FeatureRows
from outrider.wire.bundles import (
    LENGTH_DELIMITED,
    Encoded,
    encode_varint,
    parse_fields,
    read_varint,
)
from outrider.wire.checks import check_number, raise_invalid
from outrider.wire.limits import (
    MAX_DISTRIBUTION_ENTRIES,
    MAX_FEATURE_WIDTH,
    MAX_MESSAGE_BYTES,
    MAX_NODES,
    MAX_ROUND_SESSIONS,
)
from outrider.wire.rounds import (
    DraftDistributions,
    Indices,
    Proposals,
    Verdicts,
)
from outrider.wire.tensors import DTYPES_FROM_PB, DTYPES_TO_PB, FLOAT_DTYPES, NUMPY_DTYPES
from outrider.wire.v1 import exchange_pb2 as pb

VERDICTS_FIELD: Final = pb.ExchangeResponse.VERDICTS_FIELD_NUMBER
PROPOSALS_FIELD: Final = pb.ExchangeRequest.PROPOSALS_FIELD_NUMBER
_VERDICT_COLUMNS: Final = 6
_PROPOSAL_COLUMNS: Final = 3
_DISTRIBUTION_FIELDS: Final = (
    pb.Proposals.HAS_DISTRIBUTION_FIELD_NUMBER,
    pb.Proposals.DISTRIBUTION_LENS_FIELD_NUMBER,
    pb.Proposals.DISTRIBUTION_TOKEN_IDS_FIELD_NUMBER,
    pb.Proposals.DISTRIBUTION_COUNTS_FIELD_NUMBER,
)
_UINT8, _UINT16, _UINT32, _UINT64 = (np.dtype(f"<u{size}") for size in (1, 2, 4, 8))
_INT32, _FLOAT32 = np.dtype("<i4"), np.dtype("<f4")

Buffer = bytes | memoryview
ArrayT = TypeVar("ArrayT", bound=NDArray[np.generic])


class _Field(NamedTuple):
    """One field of a message to encode."""

    number: int
    content: int | bytes
    """Value of a varint field, or bytes of a length-delimited field."""


class _Fragments(NamedTuple):
    """A length-delimited field whose content is in several buffers."""

    number: int
    content: tuple[Buffer, ...]


def encode_verdicts(verdicts: Verdicts) -> tuple[Buffer, ...]:
    """Encode verdicts as an ExchangeResponse, in several buffers that the caller joins. Features
    are not copied and have their own buffers; everything else is in the first buffer."""
    columns = np.empty((_VERDICT_COLUMNS, len(verdicts)), dtype=_UINT32)
    columns[0], columns[1] = verdicts.handles, verdicts.starts
    columns[2], columns[3] = verdicts.token_counts, verdicts.feature_starts
    columns[4], columns[5] = verdicts.feature_counts, verdicts.draft_wanted
    written = [
        _Field(pb.Verdicts.COLUMNS_FIELD_NUMBER, columns.tobytes()),
        _array(pb.Verdicts.DIGESTS_FIELD_NUMBER, verdicts.digests, _UINT64),
        _array(pb.Verdicts.TOKENS_FIELD_NUMBER, verdicts.tokens, _INT32),
    ]
    rows, features = verdicts.features, None
    if rows is not None:
        expected = NUMPY_DTYPES[rows.dtype]
        if any(piece.dtype != expected for piece in rows.segments):
            raise TypeError(f"{rows.dtype} must be held as {expected}")
        written += [
            _Field(pb.Verdicts.FEATURE_DTYPE_FIELD_NUMBER, int(DTYPES_TO_PB[rows.dtype])),
            _Field(pb.Verdicts.FEATURE_WIDTH_FIELD_NUMBER, rows.width),
        ]
        if verdicts.feature_offsets is not None:
            offsets = verdicts.feature_offsets
            written.append(_array(pb.Verdicts.FEATURE_OFFSETS_FIELD_NUMBER, offsets, _UINT32))
        pieces = tuple([_raw(piece) for piece in rows.segments])
        features = _Fragments(pb.Verdicts.FEATURES_FIELD_NUMBER, pieces)
    return _message(VERDICTS_FIELD, written, features)


def encode_proposals(proposals: Proposals) -> bytes:
    """Encode proposals as an ExchangeRequest. The array of parents is omitted if all drafts are
    chains, and the array of log-probabilities if all of them are 0."""
    chains = bool((proposals.parents == chain_parents(proposals.node_counts)).all())
    columns = np.empty((_PROPOSAL_COLUMNS, len(proposals)), dtype=_UINT32)
    columns[0], columns[1] = proposals.handles, proposals.prefix_lens
    columns[2] = proposals.node_counts
    written = [
        _Field(pb.Proposals.COLUMNS_FIELD_NUMBER, columns.tobytes()),
        _array(pb.Proposals.DIGESTS_FIELD_NUMBER, proposals.digests, _UINT64),
        _array(pb.Proposals.TOKENS_FIELD_NUMBER, proposals.tokens, _INT32),
    ]
    if not chains:
        written.append(_array(pb.Proposals.PARENTS_FIELD_NUMBER, proposals.parents, _INT32))
    # Compare bits, so that -0.0 is not omitted.
    if np.ascontiguousarray(proposals.logprobs).view(np.uint32).any():
        written.append(_array(pb.Proposals.LOGPROBS_FIELD_NUMBER, proposals.logprobs, _FLOAT32))
    distributions = proposals.distributions
    if distributions is not None:
        written += [
            _array(
                pb.Proposals.HAS_DISTRIBUTION_FIELD_NUMBER, distributions.has_distribution, _UINT8
            ),
            _array(pb.Proposals.DISTRIBUTION_LENS_FIELD_NUMBER, distributions.sizes, _UINT32),
            _array(pb.Proposals.DISTRIBUTION_TOKEN_IDS_FIELD_NUMBER, distributions.ids, _INT32),
            _array(pb.Proposals.DISTRIBUTION_COUNTS_FIELD_NUMBER, distributions.counts, _UINT16),
        ]
    written.append(_Field(pb.Proposals.DRAFT_US_FIELD_NUMBER, proposals.draft_us))
    return b"".join(_message(PROPOSALS_FIELD, written))


def sole_content(data: Encoded, field: int) -> memoryview | None:
    """Return the content of `field` if the frame contains nothing else, which is the usual case. In
    all other cases return None; the caller must then call `only_member`."""
    frame = memoryview(data)
    if not 2 <= len(frame) <= MAX_MESSAGE_BYTES or frame[0] != field << 3 | LENGTH_DELIMITED:
        return None
    length, start = read_varint(frame, 1)
    return frame[start:] if start + length == len(frame) else None


def only_member(data: Encoded, field: int) -> memoryview | None:
    """Return the content of `field` if the frame contains it as its message, or None if the frame
    contains another message.

    Raises InvalidMessageError for a frame with more than one message.
    """
    found: list[memoryview] = []
    others = 0
    for name, content in parse_fields(memoryview(data)):
        if name == field and isinstance(content, memoryview):
            found.append(content)
        elif name <= _LAST_MESSAGE:
            others += 1
    if not found:
        return None
    if len(found) + others > 1:
        raise_invalid("a frame must hold exactly one message")
    return found[0]


def decode_verdicts(data: memoryview) -> Verdicts:
    """Decode verdicts from their submessage. Raises InvalidMessageError unless the lengths of all
    arrays agree.

    Features are views of `data`. All other arrays are copied before they are checked, because the
    sender can still change `data` if it is in shared memory (`ShmChannel.receive_views`).
    """
    content = _contents(data)
    columns = _columns(content, pb.Verdicts.COLUMNS_FIELD_NUMBER, _VERDICT_COLUMNS, "verdicts")
    handles, starts, token_counts, feature_starts, feature_counts, wanted = columns
    digests = _read(content, pb.Verdicts.DIGESTS_FIELD_NUMBER, _UINT64, "digests").copy()
    tokens = _read(content, pb.Verdicts.TOKENS_FIELD_NUMBER, _INT32, "tokens").copy()
    if int(wanted.max()) > 1:
        raise_invalid("draft_wanted must be 0 or 1")
    offsets = _indices(content, pb.Verdicts.FEATURE_OFFSETS_FIELD_NUMBER, "feature_offsets")
    return Verdicts(
        handles=handles,
        starts=starts,
        token_counts=token_counts,
        tokens=cast("NDArray[np.int32]", _sized(tokens, int(token_counts.sum()), "tokens")),
        digests=cast("NDArray[np.uint64]", _sized(digests, len(handles), "digests")),
        feature_starts=feature_starts,
        feature_counts=feature_counts,
        draft_wanted=wanted.astype(np.bool_),
        features=_features(content, feature_counts, offsets),
        feature_offsets=offsets if len(offsets) else None,
    )


def decode_proposals(data: memoryview) -> Proposals:
    """Decode proposals from their submessage. Raises InvalidMessageError unless the lengths of all
    arrays agree.

    All arrays are copied, because drafts are small, may be kept for long, and torch needs writable
    arrays.
    """
    content = _contents(data)
    columns = _columns(content, pb.Proposals.COLUMNS_FIELD_NUMBER, _PROPOSAL_COLUMNS, "proposals")
    handles, prefix_lens, node_counts = columns
    count = len(handles)
    digests = _read(content, pb.Proposals.DIGESTS_FIELD_NUMBER, _UINT64, "digests").copy()
    nodes = check_number(int(node_counts.sum()), "nodes", high=MAX_NODES * count)
    tokens = _read(content, pb.Proposals.TOKENS_FIELD_NUMBER, _INT32, "tokens").copy()
    draft_us = content.get(pb.Proposals.DRAFT_US_FIELD_NUMBER, 0)
    return Proposals(
        handles=handles,
        digests=cast("NDArray[np.uint64]", _sized(digests, count, "digests")),
        prefix_lens=prefix_lens,
        node_counts=node_counts,
        tokens=cast("NDArray[np.int32]", _sized(tokens, nodes, "tokens")),
        parents=_parents(content, node_counts, nodes),
        logprobs=_logprobs(content, nodes),
        distributions=_distributions(content, node_counts),
        draft_us=draft_us & MASK64 if isinstance(draft_us, int) else 0,
    )


_LAST_MESSAGE: Final = pb.ExchangeRequest.BUNDLE_FIELD_NUMBER - 1
"""Highest field number of a message in a frame. Higher numbers belong to the bundle and to fields
of newer versions."""
_Contents = Mapping[int, int | memoryview]


def _parents(content: _Contents, node_counts: Indices, nodes: int) -> NDArray[np.int32]:
    parents = _read(content, pb.Proposals.PARENTS_FIELD_NUMBER, _INT32, "parents")
    if not len(parents):
        return chain_parents(node_counts)
    return cast("NDArray[np.int32]", _sized(parents, nodes, "parents").copy())


def _logprobs(content: _Contents, nodes: int) -> NDArray[np.float32]:
    logprobs = _read(content, pb.Proposals.LOGPROBS_FIELD_NUMBER, _FLOAT32, "logprobs")
    if not len(logprobs):
        return np.zeros(nodes, dtype=np.float32)
    return cast("NDArray[np.float32]", _sized(logprobs, nodes, "logprobs").copy())


def _distributions(content: _Contents, node_counts: Indices) -> DraftDistributions | None:
    if not any(field in content for field in _DISTRIBUTION_FIELDS):
        return None
    raw = _read(content, pb.Proposals.HAS_DISTRIBUTION_FIELD_NUMBER, _UINT8, "has_distribution")
    sizes = _indices(content, pb.Proposals.DISTRIBUTION_LENS_FIELD_NUMBER, "distribution_lens")
    ids = _read(
        content, pb.Proposals.DISTRIBUTION_TOKEN_IDS_FIELD_NUMBER, _INT32, "distribution_token_ids"
    )
    counts = _read(
        content, pb.Proposals.DISTRIBUTION_COUNTS_FIELD_NUMBER, _UINT16, "distribution_counts"
    )
    if not len(raw):
        for array, name in (
            (sizes, "distribution_lens"),
            (ids, "distribution_token_ids"),
            (counts, "distribution_counts"),
        ):
            _sized(array, 0, name)
        return None
    given = _flags(_sized(raw, len(node_counts), "has_distribution").copy(), "has_distribution")
    _sized(sizes, int((node_counts[given] + 1).sum()), "distribution_lens")
    entries = check_number(int(sizes.sum()), "distribution entries", high=MAX_DISTRIBUTION_ENTRIES)
    return DraftDistributions(
        has_distribution=given,
        sizes=sizes,
        ids=cast("NDArray[np.int32]", _sized(ids, entries, "distribution_token_ids").copy()),
        counts=cast("NDArray[np.uint16]", _sized(counts, entries, "distribution_counts").copy()),
    )


def _features(content: _Contents, counts: Indices, offsets: Indices) -> FeatureRows | None:
    """Decode the feature rows. Entry e has counts[e] rows, the first of which is row offsets[e].
    Without offsets, the rows of entry e + 1 follow those of entry e."""
    data = content.get(pb.Verdicts.FEATURES_FIELD_NUMBER, b"")
    width = content.get(pb.Verdicts.FEATURE_WIDTH_FIELD_NUMBER, 0)
    tag = content.get(pb.Verdicts.FEATURE_DTYPE_FIELD_NUMBER, 0)
    if isinstance(data, int) or not isinstance(width, int) or not isinstance(tag, int):
        raise_invalid("features must be bytes with a width and an element type")
    if len(offsets):
        _sized(offsets, len(counts), "feature_offsets")
    if not len(offsets) and not counts.any() and not len(data):
        return None
    dtype = DTYPES_FROM_PB.get(tag)
    if dtype is None or dtype not in FLOAT_DTYPES:
        raise_invalid(f"features must be floating point, got element type {tag}")
    check_number(width, "feature_width", low=1, high=MAX_FEATURE_WIDTH)
    held = NUMPY_DTYPES[dtype]
    rows, rest = divmod(len(data), width * held.itemsize)
    if rest or (not len(offsets) and rows != int(counts.sum())):
        raise_invalid(
            f"{int(counts.sum())} rows of {width} {dtype} features are not {len(data)} bytes"
        )
    if len(offsets) and int((offsets + counts).max()) > rows:
        raise_invalid(f"feature_offsets beyond the {rows} rows")
    array = np.frombuffer(data, dtype=held).reshape(rows, width)
    return FeatureRows(dtype=dtype, segments=(array,))


def _flags(values: NDArray[np.generic], name: str) -> NDArray[np.bool_]:
    if len(values) and int(values.max()) > 1:
        raise_invalid(f"{name} must be 0 or 1")
    return values.view(np.bool_)


def _sized(array: ArrayT, expected: int, name: str) -> ArrayT:
    if len(array) != expected:
        raise_invalid(f"{name} must have {expected} entries, got {len(array)}")
    return array


def _columns(content: _Contents, field: int, count: int, name: str) -> Indices:
    """Decode the columns of a message with S >= 1 entries, [count, S]."""
    flat = _indices(content, field, "columns")
    if len(flat) % count:
        raise_invalid(f"columns: {len(flat)} numbers are not {count} columns")
    check_number(len(flat) // count, name, low=1, high=MAX_ROUND_SESSIONS)
    return flat.reshape(count, -1)


def _indices(content: _Contents, field: int, name: str) -> Indices:
    return _read(content, field, _UINT32, name).astype(np.int64)


def _read(
    content: _Contents, field: int, dtype: np.dtype[np.generic], name: str
) -> NDArray[np.generic]:
    data = content.get(field, b"")
    if isinstance(data, int):
        raise_invalid(f"{name} must be bytes")
    if len(data) % dtype.itemsize:
        raise_invalid(f"{name}: {len(data)} bytes are not a multiple of {dtype.itemsize}")
    return np.frombuffer(data, dtype=dtype)


def _contents(data: memoryview) -> _Contents:
    """Return the contents of the fields by field number. If a field occurs more than once, the last
    one counts, as in protobuf."""
    return {name: content for name, content in parse_fields(data) if content is not None}


def _array(field: int, values: NDArray[np.generic], dtype: np.dtype[np.generic]) -> _Field:
    return _Field(field, values.astype(dtype, copy=False).tobytes())


def _raw(values: NDArray[np.generic]) -> Buffer:
    """Return a view of the bytes of an array, which is copied only if it is not contiguous."""
    # An empty array cannot be cast.
    if not values.size:
        return b""
    held: Any = values if values.flags.c_contiguous else values.copy()
    return memoryview(held).cast("B")


def _message(
    field: int, written: Iterable[_Field], last: _Fragments | None = None
) -> tuple[Buffer, ...]:
    """Encode a frame whose only field is a submessage with these fields, as buffers to be joined.
    The buffers of `last` are not copied; the other fields are one buffer. Empty values are
    omitted."""
    chunks: list[bytes] = []
    for name, content in written:
        if isinstance(content, int):
            if content:
                chunks += (encode_varint(name << 3), encode_varint(content))
        elif content:
            chunks += (
                encode_varint(name << 3 | LENGTH_DELIMITED),
                encode_varint(len(content)),
                content,
            )
    pieces = () if last is None else last.content
    behind = sum(map(len, pieces))
    if last is not None and behind:
        chunks += (encode_varint(last.number << 3 | LENGTH_DELIMITED), encode_varint(behind))
    size = sum(map(len, chunks)) + behind
    if size > MAX_MESSAGE_BYTES:
        raise_invalid(f"a message of {size} bytes, at most {MAX_MESSAGE_BYTES} are allowed")
    return (
        b"".join((encode_varint(field << 3 | LENGTH_DELIMITED), encode_varint(size), *chunks)),
        *pieces,
    )
