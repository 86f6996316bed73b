"""Every port of every process takes garbage: a typed error comes back, nothing dies or leaks."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.client import Client, RetryPolicy, user
from outrider.ids import DrafterId
from outrider.spec.plan import DraftMethod
from outrider.spec.tree import DraftTree
from outrider.transport.grpc import GrpcDialer
from outrider.wire.messages import (
    PROTOCOL_VERSION,
    FeatureLayout,
    Heartbeat,
    Hello,
    Proposal,
    Proposals,
    Verdicts,
    VerifierInfo,
)
from tests.integration.stack import Stack, StackOptions
from tests.waiting import wait_until

SERVICES = {
    "router": ("InferenceService", ["Generate", "GenerateStream", "Abort", "GetServerInfo"]),
    "verifier": ("VerifierService", ["SetPlan", "CloseSession", "GetInfo"]),
    "drafter": ("DrafterService", ["Attach", "Detach", "Drain", "GetInfo"]),
    "pool": ("PoolService", ["AddDrafter", "RemoveDrafter"]),
}
STREAMING = {"GenerateStream"}
TYPED = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}
PROMPT = [user("Count: 0 1 2 3 4 5 6 7 8 9")]


@pytest.fixture(scope="module")
def stack_options() -> StackOptions:
    return {"router": ["--pool-listen", "127.0.0.1:0"]}


def address_of(stack: Stack, role: str) -> str:
    """Where a role's service is; the pool's is the router's."""
    if role == "pool":
        return str(stack.router.ready["pool"])
    return str(getattr(stack, role).address)


def check_unharmed(stack: Stack) -> None:
    """All three live, the same text comes out, and nothing is held."""
    assert all(p.alive for p in (stack.router, stack.verifier, stack.drafter))
    with Client(stack.router.address, retry=RetryPolicy(max_attempts=1)) as client:
        drafted = client.generate(PROMPT, max_tokens=16, temperature=0.0)
        plain = client.generate(PROMPT, max_tokens=16, temperature=0.0, drafter="none")
        assert drafted.token_ids == plain.token_ids
        wait_until(lambda: holds_nothing(client), what="nothing held")


def holds_nothing(client: Client) -> bool:
    """Whether no request runs and every KV block is free, as far as the router has heard."""
    info = client.server_info()
    return info.running == 0 and all(v.kv_free_blocks == v.kv_total_blocks for v in info.verifiers)


@pytest.mark.parametrize("role", list(SERVICES))
def test_random_bytes_to_every_method_give_a_typed_error(survivor: Stack, role: str) -> None:
    service, methods = SERVICES[role]
    address = address_of(survivor, role)

    @settings(max_examples=40, suppress_health_check=list(HealthCheck))
    @given(data=st.binary(min_size=1, max_size=300), method=st.sampled_from(methods))
    def probe(data: bytes, method: str) -> None:
        path = f"/outrider.wire.v1.{service}/{method}"
        try:
            if method in STREAMING:
                for _ in channel.unary_stream(path)(data, timeout=2.0):
                    break
            else:
                channel.unary_unary(path)(data, timeout=2.0)
        except grpc.RpcError as error:
            assert error.code() in TYPED, error.details()

    with grpc.insecure_channel(address) as channel:
        probe()
    check_unharmed(survivor)


@pytest.mark.parametrize("role", list(SERVICES))
def test_an_oversized_message_is_refused(survivor: Stack, role: str) -> None:
    service, methods = SERVICES[role]
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(address_of(survivor, role), options=options) as channel:
        call = channel.unary_unary(f"/outrider.wire.v1.{service}/{methods[-1]}")
        with pytest.raises(grpc.RpcError) as failure:
            call(bytes(80 << 20), timeout=20.0)
    assert failure.value.code() in TYPED
    check_unharmed(survivor)


def tree(tokens: list[int], parents: list[int], logprobs: list[float]) -> DraftTree:
    return DraftTree(
        np.array(tokens, np.int32), np.array(parents, np.int32), np.array(logprobs, np.float32)
    )


HOSTILE_TREES = {
    "token out of range": tree([10**6], [-1], [-0.1]),
    "negative token": tree([-5], [-1], [-0.1]),
    "parent after child": tree([5, 6], [1, -1], [-0.1, -0.1]),
    "own parent": tree([5], [0], [-0.1]),
    "child above its parent": tree([5, 6], [-1, 0], [-3.0, -0.1]),
    "not a number": tree([5], [-1], [float("nan")]),
    "too many nodes": tree([5] * 300, [-1] * 300, [-0.1] * 300),
}


@pytest.mark.parametrize("case", list(HOSTILE_TREES))
async def test_a_lying_drafter_changes_no_token(survivor: Stack, case: str) -> None:
    dialer = GrpcDialer()
    try:
        info = await (await dialer.verifier(survivor.verifier.address)).info()
        connection = await dialer.exchange(survivor.verifier.address)
        await connection.send(hello(info))
        await connection.receive()
        bad = HOSTILE_TREES[case]
        for digest in (0, 1, 2**64 - 1):
            lie = Proposals.of_proposals(
                [Proposal(handle=0, prefix_digest=digest, prefix_len=3, tree=bad)]
            )
            for _ in range(3):
                await connection.send(lie)
        await connection.close()
    finally:
        await dialer.close()
    await asyncio.to_thread(check_unharmed, survivor)


HOSTILE_FRAMES = {
    "nested": b"\x7a\x04\x7a\x02\x7a\x00",
    "millions of empty bundles": b"\x7a\x00" * (4 << 20),
    "cut short": b"\x7a\x7f",
    "bundle beside a message": b"\x1a\x02\x08\x01\x7a\x04\x1a\x02\x08\x01",
    "garbage among heartbeats": b"\x7a\x04\x1a\x02\x08\x01\x7a\x02\xff\xff" * 500,
}


@pytest.mark.parametrize("case", list(HOSTILE_FRAMES))
async def test_hostile_bundles_cost_themselves(survivor: Stack, case: str) -> None:
    dialer = GrpcDialer()
    try:
        info = await (await dialer.verifier(survivor.verifier.address)).info()
        connection: Any = await dialer.exchange(survivor.verifier.address)
        await connection.send(hello(info))
        await connection.receive()
        for _ in range(5):
            await connection.inner.frames.send(HOSTILE_FRAMES[case])
        # The stream lives: a heartbeat interval later nothing but silence came.
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(connection.receive(), 0.7)
        await connection.close()
    finally:
        await dialer.close()
    await asyncio.to_thread(check_unharmed, survivor)


async def test_replayed_proposals_of_a_stranger_are_dropped(survivor: Stack) -> None:
    """One proposal sent over and over, for a session that is not there, disturbs no running one."""
    dialer = GrpcDialer()
    try:
        info = await (await dialer.verifier(survivor.verifier.address)).info()
        connection = await dialer.exchange(survivor.verifier.address)
        await connection.send(hello(info))
        await connection.receive()

        def generate() -> tuple[int, ...]:
            with Client(survivor.router.address) as client:
                return client.generate(
                    PROMPT, max_tokens=200, ignore_eos=True, temperature=0.0
                ).token_ids

        work = asyncio.create_task(asyncio.to_thread(generate))
        stray = Proposal(handle=0, prefix_digest=7, prefix_len=1, tree=tree([5], [-1], [-0.1]))
        replay = Proposals.of_proposals([stray])
        while not work.done():
            await connection.send(replay)
            await asyncio.sleep(0.002)
        assert await work == await asyncio.to_thread(generate)
        await connection.close()
    finally:
        await dialer.close()
    await asyncio.to_thread(check_unharmed, survivor)


@pytest.mark.parametrize(
    "change",
    [
        {"vocab_size": 7},
        {"protocol_version": 99},
        {"tokenizer_hash": "0" * 64},
        {"feature_fingerprint": "0" * 64, "feature_layout": FeatureLayout.PROJECTED},
    ],
    ids=lambda change: next(iter(change)),
)
async def test_a_drafter_that_does_not_fit_is_refused(
    survivor: Stack, change: dict[str, object]
) -> None:
    dialer = GrpcDialer()
    try:
        info = await (await dialer.verifier(survivor.verifier.address)).info()
        connection = await dialer.exchange(survivor.verifier.address)
        await connection.send(dataclasses.replace(hello(info), **change))  # type: ignore[arg-type]
        with pytest.raises(Exception, match=r"(?i)token ids|protocol|tokenizer|feature") as refused:
            while True:
                message = await connection.receive()
                assert isinstance(message, Heartbeat | Verdicts)
        assert getattr(refused.value, "code", "") in ("FAILED_PRECONDITION", "UNAVAILABLE")
        await connection.close()
    finally:
        await dialer.close()


def hello(info: VerifierInfo) -> Hello:
    return Hello(
        protocol_version=PROTOCOL_VERSION,
        drafter_id=DrafterId("stranger"),
        incarnation="one",
        vocab_size=info.vocab_size,
        tokenizer_hash=info.tokenizer_hash,
        methods=(DraftMethod.NGRAM,),
        feature_layout=FeatureLayout.NONE,
        feature_fingerprint="",
    )
