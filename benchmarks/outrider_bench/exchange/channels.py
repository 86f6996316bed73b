"""Channels that the exchange benchmark compares, each with the drafter's end and the verifier's
end.

  grpc.aio      stream of gRPC owned by an event loop on each side; Outrider uses it between hosts
  shm           shared-memory channel; Outrider uses it on one host
  shm.in_place  like shm, but the features are already in the channel's memory, as if a device had
                written them there
  grpc          synchronous stream of gRPC that the worker threads read and write
  socket        Unix socket that the worker threads read and write
  socket.aio    Unix socket that event loops read and write
"""

from __future__ import annotations

import asyncio
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import grpc
import numpy as np
from numpy.typing import NDArray

from outrider.process_tuning import keep_freed_memory
from outrider.spec.tree import DraftTree
from outrider.transport.pollable_queue import PollableQueue
from outrider.transport.shm import Frame, ShmChannel, ShmListener, join_channel
from outrider.wire.codec import decode_verifier_messages, encode_drafter_message
from outrider.wire.limits import MAX_MESSAGE_BYTES
from outrider.wire.messages import EncodedMessage, Proposal, Proposals, ShmOffer, Verdicts
from outrider_bench.exchange.payload import DRAFT_LENGTH

_METHOD = "/bench/Exchange"
_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]
_WAIT_S = 30.0


class BenchChannel(Protocol):
    """Interface of a channel that carries frames between the worker threads of two processes."""

    def send(self, frame: Frame) -> None:
        """Send a frame to the other end."""
        ...

    def receive(self) -> bytes | memoryview:
        """Wait for the next frame and return it."""
        ...


def answer_rounds(channel: BenchChannel) -> None:
    """Answer each round of verdicts with a draft for every session, a chain of four tokens. This is
    the loop of the drafter's worker thread."""
    keep_freed_memory()
    made: dict[int, Proposals] = {}
    while True:
        (told,) = decode_verifier_messages(channel.receive())
        assert isinstance(told, Verdicts)
        count = len(told)
        if count not in made:
            tree = DraftTree.chain(np.arange(DRAFT_LENGTH, dtype=np.int32))
            made[count] = Proposals.of_proposals(
                [
                    Proposal(handle=handle, prefix_digest=handle, prefix_len=9, tree=tree)
                    for handle in range(count)
                ]
            )
        channel.send(encode_drafter_message(made[count]))


def _joined(frame: Frame) -> bytes:
    return frame.data if isinstance(frame, EncodedMessage) else frame


class LoopChannel:
    """Channel of a worker thread whose frames are read and written by an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._arrived: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._write: Callable[[bytes], Any] | None = None
        self._writing: set[asyncio.Future[Any]] = set()
        """Pending writes. The event loop itself keeps only weak references to them."""
        self._write_lock = asyncio.Lock()
        """Held during a write. gRPC allows only one write at a time per stream, and the answer to a
        frame can arrive, and cause the next write, before the write of that frame has returned."""

    async def serve(self, stream: Any) -> None:
        """Read frames from the stream on the event loop until the stream ends."""
        self._write = stream.write
        while (frame := await stream.read()) is not grpc.aio.EOF:
            self._arrived.put(frame)

    def send(self, frame: Frame) -> None:
        self._loop.call_soon_threadsafe(self._begin, _joined(frame))

    def receive(self) -> bytes:
        return self._arrived.get(timeout=_WAIT_S)

    def _begin(self, frame: bytes) -> None:
        writing = asyncio.ensure_future(self._write_frame(frame))
        self._writing.add(writing)
        writing.add_done_callback(self._writing.discard)

    async def _write_frame(self, frame: bytes) -> None:
        assert self._write is not None
        async with self._write_lock:
            await self._write(frame)


class StreamChannel:
    """Channel whose worker thread reads and writes a synchronous stream of gRPC."""

    def __init__(self) -> None:
        self._leaving: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.incoming: Iterator[bytes] = iter(())

    def outgoing(self) -> Iterator[bytes]:
        """Yield the frames to send. gRPC iterates over them in a thread of its own and writes
        them."""
        while True:
            yield self._leaving.get()

    def send(self, frame: Frame) -> None:
        self._leaving.put(_joined(frame))

    def receive(self) -> bytes:
        return next(self.incoming)


class SocketChannel:
    """Channel whose worker thread reads and writes a Unix socket; a length precedes each frame."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    def send(self, frame: Frame) -> None:
        data = _joined(frame)
        self._socket.sendall(struct.pack("<I", len(data)))
        self._socket.sendall(data)

    def receive(self) -> bytes:
        (size,) = struct.unpack("<I", self._read(4))
        return self._read(size)

    def _read(self, size: int) -> bytes:
        data = bytearray(size)
        view = memoryview(data)
        while len(view):
            view = view[self._socket.recv_into(view) :]
        return bytes(data)


class ShmBenchChannel:
    """Channel whose worker thread reads and writes a shared-memory channel."""

    def __init__(self, shm_channel: ShmChannel) -> None:
        self._shm_channel = shm_channel
        self._wakeup_queue: PollableQueue[None] = PollableQueue()
        self._frames: list[bytes | memoryview] = []

    def send(self, frame: Frame) -> None:
        self._shm_channel.send(frame)

    def receive(self) -> bytes | memoryview:
        while not self._frames:
            if not self._wakeup_queue.wait_ready(_WAIT_S, [self._shm_channel.fileno()]):
                raise TimeoutError("no frame came by the shared-memory channel")
            self._frames = self._shm_channel.receive_views()
        return self._frames.pop(0)


class InPlaceShmBenchChannel(ShmBenchChannel):
    """Shared-memory channel whose memory contains the features already, as if a device had written
    them there."""

    def __init__(self, shm_channel: ShmChannel) -> None:
        super().__init__(shm_channel)
        shm_channel.allow_reservations(lambda memory: True)

    def reserve(self, size: int) -> NDArray[np.uint8] | None:
        """Reserve `size` bytes of the channel's memory for features; see
        `ShmChannel.reserve_frame`."""
        return self._shm_channel.reserve_frame(size)


class LoopSocket:
    """Unix socket whose frames an event loop reads and writes."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self._socket = connected

    async def read(self) -> bytes:
        """Return the next frame."""
        (size,) = struct.unpack("<I", await self._read(4))
        return await self._read(size)

    async def write(self, frame: bytes) -> None:
        """Send a frame."""
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._socket, struct.pack("<I", len(frame)))
        await loop.sock_sendall(self._socket, frame)

    async def _read(self, size: int) -> bytes:
        data, loop = bytearray(size), asyncio.get_running_loop()
        view = memoryview(data)
        while len(view):
            view = view[await loop.sock_recv_into(self._socket, view) :]
        return bytes(data)


def _serve_aio(address: str) -> None:
    async def serve() -> None:
        async def exchange(_requests: object, context: Any) -> None:
            channel = LoopChannel(asyncio.get_running_loop())
            threading.Thread(target=answer_rounds, args=(channel,), daemon=True).start()
            await channel.serve(context)

        handlers: dict[str, Any] = {"Exchange": grpc.stream_stream_rpc_method_handler(exchange)}
        server = grpc.aio.server(options=_OPTIONS)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", handlers),))
        server.add_insecure_port(address)
        await server.start()
        await server.wait_for_termination()

    asyncio.run(serve())


def _serve_grpc(address: str) -> None:
    def exchange(requests: Iterator[bytes], _context: object) -> Iterator[bytes]:
        channel = StreamChannel()
        channel.incoming = requests
        threading.Thread(target=answer_rounds, args=(channel,), daemon=True).start()
        yield from channel.outgoing()

    handlers: dict[str, Any] = {"Exchange": grpc.stream_stream_rpc_method_handler(exchange)}
    server = grpc.server(ThreadPoolExecutor(4), options=_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", handlers),))
    server.add_insecure_port(address)
    server.start()
    server.wait_for_termination()


def _accepted(address: str) -> socket.socket:
    """Listen at an address and return the first connection."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{address}.new")
        listening.listen()
        Path(f"{address}.new").rename(address)
        return listening.accept()[0]


def _serve_socket(address: str) -> None:
    answer_rounds(SocketChannel(_accepted(address)))


def _serve_socket_aio(address: str) -> None:
    async def serve(connected: socket.socket) -> None:
        channel = LoopChannel(asyncio.get_running_loop())
        threading.Thread(target=answer_rounds, args=(channel,), daemon=True).start()
        await channel.serve(LoopSocket(connected))

    asyncio.run(serve(_accepted(address)))


def _serve_shm(address: str) -> None:
    async def join() -> ShmChannel:
        listener = ShmListener()
        offer = listener.make_offer()
        written = Path(f"{address}.new")
        written.write_text(f"{offer.name} {offer.token.hex()}")
        written.rename(address)
        try:
            return await listener.wait_joined(offer)
        finally:
            listener.close()

    answer_rounds(ShmBenchChannel(asyncio.run(join())))


def _through_aio(address: str, work: Callable[[BenchChannel], None]) -> None:
    async def run() -> None:
        async with grpc.aio.insecure_channel(address, options=_OPTIONS) as remote:
            await asyncio.wait_for(remote.channel_ready(), _WAIT_S)
            call: Any = remote.stream_stream(_METHOD)()
            channel = LoopChannel(asyncio.get_running_loop())
            serving = asyncio.ensure_future(channel.serve(call))
            await asyncio.sleep(0)
            await asyncio.to_thread(work, channel)
            serving.cancel()
            call.cancel()

    asyncio.run(run())


def _through_grpc(address: str, work: Callable[[BenchChannel], None]) -> None:
    with grpc.insecure_channel(address, options=_OPTIONS) as remote:
        grpc.channel_ready_future(remote).result(_WAIT_S)
        channel = StreamChannel()
        method: Any = remote.stream_stream(_METHOD)
        call = method(channel.outgoing())
        channel.incoming = call
        work(channel)
        call.cancel()


def _await_file(address: str) -> None:
    deadline = time.monotonic() + _WAIT_S
    while not Path(address).exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def _connect_shm(
    address: str,
    work: Callable[[BenchChannel], None],
    channel: Callable[[ShmChannel], BenchChannel] = ShmBenchChannel,
) -> None:
    _await_file(address)
    name, token = Path(address).read_text().split()
    shm_channel = join_channel(ShmOffer(name=name, token=bytes.fromhex(token)))
    try:
        work(channel(shm_channel))
    finally:
        shm_channel.close()


def _connect(address: str) -> socket.socket:
    _await_file(address)
    connected = socket.socket(socket.AF_UNIX)
    connected.connect(address)
    return connected


def _through_socket(address: str, work: Callable[[BenchChannel], None]) -> None:
    with _connect(address) as connected:
        work(SocketChannel(connected))


def _through_socket_aio(address: str, work: Callable[[BenchChannel], None]) -> None:
    async def run(connected: socket.socket) -> None:
        channel = LoopChannel(asyncio.get_running_loop())
        serving = asyncio.ensure_future(channel.serve(LoopSocket(connected)))
        await asyncio.sleep(0)
        await asyncio.to_thread(work, channel)
        serving.cancel()

    with _connect(address) as connected:
        asyncio.run(run(connected))


TRANSPORTS: dict[
    str, tuple[Callable[[str], None], Callable[[str, Callable[[BenchChannel], None]], None]]
] = {
    "grpc.aio": (_serve_aio, _through_aio),
    "shm": (_serve_shm, _connect_shm),
    "shm.in_place": (_serve_shm, partial(_connect_shm, channel=InPlaceShmBenchChannel)),
    "grpc": (_serve_grpc, _through_grpc),
    "socket.aio": (_serve_socket_aio, _through_socket_aio),
    "socket": (_serve_socket, _through_socket),
}
