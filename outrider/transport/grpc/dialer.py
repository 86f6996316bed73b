"""gRPC dialer: control clients and exchange connections by address (host:port)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import cast

import grpc

from outrider.errors import ConnectionLostError, UnavailableError
from outrider.ids import SessionId
from outrider.spec.plan import SpeculationPlan
from outrider.transport.framed_connection import FrameStream, drafter_end, router_end
from outrider.transport.grpc.credentials import channel_credentials
from outrider.transport.grpc.draining_channel import DrainingChannel, Metadata, ServerStream
from outrider.transport.grpc.error_status import to_lost_error
from outrider.transport.grpc.options import GrpcConfig, channel_options
from outrider.transport.grpc.servicers import (
    DRAFTER_SERVICE,
    EMPTY,
    EXCHANGE_SERVICE,
    VERIFIER_SERVICE,
)
from outrider.transport.grpc.shm_frames import ShmFrames
from outrider.transport.grpc.shm_negotiation import is_joined, offer_metadata
from outrider.transport.grpc.streams import StreamFrames
from outrider.transport.interface import DrafterConnection, RouterConnection
from outrider.transport.session_stream import SessionIteratorMixin
from outrider.transport.shm import ShmListener
from outrider.transport.tls import CertificateRole, TlsConfig, TlsFiles, TlsMaterial
from outrider.wire.codec import (
    decode_drafter_info,
    decode_verifier_info,
    encode_close_session,
    encode_drain,
    encode_set_plan,
    encode_verifier_address,
)
from outrider.wire.messages import DrafterInfo, VerifierInfo


class _GrpcClient:
    """Unary calls with a deadline and typed errors."""

    def __init__(
        self, line: Callable[[], DrainingChannel], address: str, config: GrpcConfig
    ) -> None:
        """Create a client. `line` returns the channel. It is called before each RPC, because
        certificates may have been replaced since the last RPC."""
        self._line = line
        self._address = address
        self._config = config

    async def _call(self, service: str, method: str, request: bytes) -> bytes:
        call = self._line().unary(f"/{service}/{method}", request, self._config.control_timeout_s)
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise to_lost_error(error, peer=self._address) from None


class GrpcVerifier(_GrpcClient, SessionIteratorMixin):
    """Control client of a verifier over gRPC."""

    def __init__(
        self,
        line: Callable[[], DrainingChannel],
        address: str,
        config: GrpcConfig,
        shm_channels: Callable[[], ShmListener | None],
    ) -> None:
        """Create a client. `shm_channels` returns the listener that a verifier on this host can
        join, or None if shared-memory channels are not used. `line` returns the channel and is
        called before each RPC."""
        super().__init__(line, address, config)
        self._shm_channels = shm_channels

    async def info(self) -> VerifierInfo:
        """Return identity, capacity and load of the verifier."""
        return decode_verifier_info(await self._call(VERIFIER_SERVICE, "GetInfo", EMPTY))

    async def sessions(self) -> RouterConnection:
        """Open a session stream to the verifier. Raises UnavailableError."""
        listener = self._shm_channels()
        if listener is None:
            frames: FrameStream = _client_frames(await self._begun(()), self._address)
        else:
            frames = await self._by_shm_channel(listener)
        return router_end(frames, self._config.heartbeat)

    async def _begun(self, metadata: Metadata) -> grpc.aio.StreamStreamCall[bytes, bytes]:
        call = self._line().stream(f"/{VERIFIER_SERVICE}/Sessions", metadata)
        return await _answered(call, self._address, self._config)

    async def _by_shm_channel(self, listener: ShmListener) -> FrameStream:
        """Open a session stream and return its frames. They use a shared-memory channel if the
        verifier joins it."""
        offer = listener.make_offer()
        try:
            call = await self._begun(offer_metadata(offer))
            try:
                joined = is_joined(await call.initial_metadata())
                shm_channel = await listener.wait_joined(offer) if joined else None
            except BaseException:
                call.cancel()
                raise
        finally:
            listener.withdraw_offer(offer)
        frames = _client_frames(call, self._address)
        return frames if shm_channel is None else ShmFrames(frames, shm_channel)

    async def set_plan(self, session_id: SessionId, plan: SpeculationPlan) -> None:
        """Change a session's plan."""
        await self._call(VERIFIER_SERVICE, "SetPlan", encode_set_plan(session_id, plan))

    async def close_session(self, session_id: SessionId) -> None:
        """End a session."""
        await self._call(VERIFIER_SERVICE, "CloseSession", encode_close_session(session_id))


class GrpcDrafter(_GrpcClient):
    """Control client of a drafter over gRPC."""

    async def info(self) -> DrafterInfo:
        """Return identity and load of the drafter."""
        return decode_drafter_info(await self._call(DRAFTER_SERVICE, "GetInfo", EMPTY))

    async def attach(self, verifier_address: str) -> None:
        """Connect the drafter to a verifier."""
        request = encode_verifier_address(verifier_address)
        await self._call(DRAFTER_SERVICE, "Attach", request)

    async def detach(self, verifier_address: str) -> None:
        """Disconnect the drafter from a verifier."""
        request = encode_verifier_address(verifier_address)
        await self._call(DRAFTER_SERVICE, "Detach", request)

    async def set_draining(self, draining: bool) -> None:
        """Set whether the drafter announces that it will stop."""
        await self._call(DRAFTER_SERVICE, "Drain", encode_drain(draining))


class GrpcDialer:
    """Opens connections to other processes over gRPC. All calls to an address share one channel."""

    def __init__(self, config: GrpcConfig | None = None, *, tls: TlsConfig | None = None) -> None:
        """Create a dialer. With `tls`, peers are identified by the names in their certificates,
        regardless of their addresses.

        Raises FailedPreconditionError (BAD_TLS) if the TLS files cannot be used.
        """
        self._config = config or GrpcConfig()
        self._tls = tls if tls is not None and tls.enabled else None
        self._files = None if self._tls is None else TlsFiles(self._tls)
        self._lines: dict[str, DrainingChannel] = {}
        self._shown: dict[str, TlsMaterial] = {}
        """Certificates and keys with which the channels were opened, by address."""
        self._listener: ShmListener | None = None
        self._retired: set[DrainingChannel] = set()
        """Channels that are closed when the calls that still run on them have ended."""

    def channel(
        self, address: str, role: CertificateRole = CertificateRole.VERIFIER
    ) -> grpc.aio.Channel:
        """Return the channel to an address. With TLS, the peer's certificate must have this
        role."""
        return self._line(address, role).channel

    def _line(
        self, address: str, role: CertificateRole = CertificateRole.VERIFIER
    ) -> DrainingChannel:
        line = self._lines.get(address)
        if (
            self._files is not None
            and self._shown.get(address) is not self._files.current_material()
        ):
            self._shown[address] = self._files.current_material()
            if line is not None:
                self._retire(line)
            line = None
        if line is None:
            line = self._lines[address] = DrainingChannel(self._dial(address, role))
        return line

    def _dial(self, address: str, role: CertificateRole) -> grpc.aio.Channel:
        options: list[tuple[str, int | str]] = [*channel_options(self._config)]
        if self._tls is None or self._files is None:
            return grpc.aio.insecure_channel(address, options=options)
        options.append(("grpc.ssl_target_name_override", self._tls.names_of(role)[0]))
        credentials = channel_credentials(self._files)
        return grpc.aio.secure_channel(address, credentials, options=options)

    async def exchange(self, verifier_address: str) -> DrafterConnection:
        """Open an exchange connection to a verifier. Raises UnavailableError."""
        call = self._line(verifier_address).stream(f"/{EXCHANGE_SERVICE}/Exchange")
        call = await _answered(call, verifier_address, self._config)
        return drafter_end(
            _client_frames(call, verifier_address),
            self._config.heartbeat,
            bundle_bytes=self._config.bundle_bytes,
        )

    async def verifier(self, address: str) -> GrpcVerifier:
        """Return a control client of the verifier at `address`."""
        return GrpcVerifier(lambda: self._line(address), address, self._config, self._shm_channels)

    async def drafter(self, address: str) -> GrpcDrafter:
        """Return a control client of the drafter at `address`."""
        return GrpcDrafter(
            lambda: self._line(address, CertificateRole.DRAFTER), address, self._config
        )

    def _shm_channels(self) -> ShmListener | None:
        if self._listener is None and self._config.shm_channels:
            self._listener = ShmListener.open()
        return self._listener

    def server_stream(
        self,
        address: str,
        path: str,
        request: bytes,
        *,
        role: CertificateRole,
        metadata: Sequence[tuple[str, str | bytes]] = (),
        timeout_s: float | None = None,
    ) -> ServerStream:
        """Begin a call with one request and a stream of responses, both as bytes. `path` is the
        method's path (/SERVICE/METHOD) and `timeout_s` the call's timeout in seconds. With TLS, the
        peer's certificate must have this role."""
        return self._line(address, role).server_stream(path, request, timeout_s, metadata)

    def retire_channels(self) -> None:
        """Close every channel as soon as its running calls have ended. Later calls open new
        channels."""
        lines, self._lines = self._lines, {}
        self._shown.clear()
        for line in lines.values():
            self._retire(line)

    def _retire(self, line: DrainingChannel) -> None:
        self._retired.add(line)
        line.close_after_calls(self._retired.discard)

    async def close_channel(self, address: str) -> None:
        """Close the channel to an address, if there is one."""
        self._shown.pop(address, None)
        line = self._lines.pop(address, None)
        if line is not None:
            await line.close()

    @property
    def num_retired_channels(self) -> int:
        """Number of channels that are closed when the calls that still run on them have ended."""
        return len(self._retired)

    async def close(self) -> None:
        """Close every channel."""
        lines, self._lines = [*self._lines.values(), *self._retired], {}
        self._retired.clear()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for line in lines:
            await line.close()


async def _answered(
    call: grpc.aio.StreamStreamCall[bytes, bytes], address: str, config: GrpcConfig
) -> grpc.aio.StreamStreamCall[bytes, bytes]:
    """Wait until the server has started the call's handler, then return the call. Raises
    UnavailableError."""
    try:
        async with asyncio.timeout(config.connect_timeout_s):
            # Answered by the server's initial metadata: the handler is running.
            await call.initial_metadata()
            await call.wait_for_connection()
    except TimeoutError:
        call.cancel()
        raise UnavailableError(
            f"{address} did not answer within {config.connect_timeout_s:g} s",
            reason="CONNECT_TIMEOUT",
        ) from None
    except grpc.aio.AioRpcError as error:
        raise to_lost_error(error, peer=address) from None
    except asyncio.CancelledError:
        call.cancel()
        raise
    return call


async def _read(
    call: grpc.aio.StreamStreamCall[bytes, bytes],
    peer: str,
) -> bytes | None:
    """Return the next message of a stream, or None at its end. Raises a typed error if the stream
    broke."""
    try:
        frame = await call.read()
    except grpc.aio.AioRpcError as error:
        raise to_lost_error(error, peer=peer) from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # grpc.aio reports a call that was cancelled locally as if its reader were cancelled.
        raise ConnectionLostError(f"connection to {peer} is closed", reason="CLOSED") from None
    return None if frame is grpc.aio.EOF else cast("bytes", frame)


def _client_frames(call: grpc.aio.StreamStreamCall[bytes, bytes], peer: str) -> StreamFrames:
    async def read() -> bytes | None:
        return await _read(call, peer)

    async def write(frame: bytes) -> None:
        try:
            await call.write(frame)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise ConnectionLostError(f"lost {peer}", reason="PEER_LOST") from error

    return StreamFrames(
        peer, read, write, half_close=call.done_writing, cancel=lambda: bool(call.cancel())
    )
