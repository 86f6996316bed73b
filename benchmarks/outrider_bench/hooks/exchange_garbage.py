# pyright: reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Hook of a drafter or a verifier that writes garbage into the buffers of a device exchange.

    --hook outrider_bench.hooks.exchange_garbage:switch=FILE,buffer=drafts

While the file `switch` exists, a thread repeatedly writes random bytes into the buffer, as a whole
and in parts. `buffer` is `drafts`, which a verifier reads, or `verdicts`, which a drafter reads.
Both processes can write into both buffers, so either can act as a faulty peer. A wrong round number
soon ends an exchange. With `number=false` the round number is not overwritten, so that the peer
reads the garbage.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from pathlib import Path
from typing import Final

import numpy as np
import torch
import triton
import triton.language as tl

from outrider.engine.device.exchange.layout import NUMBER_BYTES
from outrider.engine.device.exchange.memory import SharedMemory
from outrider.engine.device.exchange.side import ExchangeSide
from outrider.errors import InvalidRequestError

logger = logging.getLogger(__name__)

GARBAGE_WRITTEN: Final = "garbage written"
"""Log event that is written once each time the file `switch` appears."""
_BUFFERS: Final = ("drafts", "verdicts")
_PAUSE_S: Final = 0.0005
_BLOCK: Final = 1024


def install(hooks: object, *, switch: str, buffer: str = "drafts", number: bool = True) -> None:
    """Write garbage while the file `switch` exists. Raises InvalidRequestError for an unknown
    buffer."""
    del hooks
    if buffer not in _BUFFERS:
        raise InvalidRequestError(f"buffer must be one of {', '.join(_BUFFERS)}, got {buffer!r}")
    writer = GarbageWriter(Path(switch), first_byte=0 if number else NUMBER_BYTES)
    attach, detach = ExchangeSide.attach, ExchangeSide.detach

    def attach_and_write(
        side: ExchangeSide, *, verdicts: SharedMemory, drafts: SharedMemory
    ) -> None:
        attach(side, verdicts=verdicts, drafts=drafts)
        writer.add_target(side, drafts if buffer == "drafts" else verdicts)

    def spare_and_detach(side: ExchangeSide) -> None:
        writer.remove_target(side)
        detach(side)

    ExchangeSide.attach = attach_and_write  # type: ignore[method-assign,assignment]
    ExchangeSide.detach = spare_and_detach  # type: ignore[method-assign,assignment]


class GarbageWriter:
    """Writes random bytes into the memory of exchanges, on a thread of its own."""

    def __init__(self, switch: Path, *, first_byte: int) -> None:
        self._switch, self._first_byte = switch, first_byte
        self._random = np.random.default_rng(0)
        self._targets: dict[ExchangeSide, SharedMemory] = {}
        self._lock = threading.Lock()
        """Held while garbage is written, so that the memory is not closed in the meantime."""
        self._stream: torch.cuda.Stream | None = None
        threading.Thread(target=self._run, name="garbage", daemon=True).start()

    def add_target(self, side: ExchangeSide, memory: SharedMemory) -> None:
        """Begin to write into `memory`, a buffer of the exchange of `side`."""
        with self._lock:
            self._targets[side] = memory

    def remove_target(self, side: ExchangeSide) -> None:
        """Stop writing into the buffer of this side."""
        with self._lock:
            self._targets.pop(side, None)

    def _run(self) -> None:
        was_on = False
        while True:
            is_on = self._switch.exists()
            wrote = is_on and self._write_all()
            if wrote and not was_on:
                logger.warning(GARBAGE_WRITTEN)
            was_on = wrote or (is_on and was_on)
            time.sleep(_PAUSE_S)

    def _write_all(self) -> bool:
        with self._lock:
            for side, memory in self._targets.items():
                size = (memory.num_bytes - self._first_byte) // 4
                # Parts leave others as they are: a draft with its digest but without its tokens.
                start = int(self._random.integers(size)) if self._random.random() < 0.5 else 0
                count = int(self._random.integers(1, size - start + 1)) if start else size
                words = self._random.integers(-(2**31), 2**31, count).astype(np.int32)
                address = memory.address + self._first_byte + 4 * start
                self._write(address, words, side.state.words.device)
            return bool(self._targets)

    def _write(self, address: int, words: np.ndarray, device: torch.device) -> None:
        if device.type != "cuda":
            ctypes.memmove(address, words.ctypes.data, words.nbytes)
            return
        # By a kernel on a stream of its own, as peers write: what waits on others goes on.
        torch.cuda.set_device(device)
        self._stream = self._stream or torch.cuda.Stream(device)
        with torch.cuda.stream(self._stream):
            source = torch.from_numpy(words).to(device)
            target = torch.tensor([address], dtype=torch.int64, device=device)
            grid = (triton.cdiv(len(words), _BLOCK),)
            _copy_words[grid](target, source, len(words), BLOCK=_BLOCK)
            self._stream.synchronize()


@triton.jit
def _copy_words(target, source, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(source + at, mask=at < count)
    tl.store(tl.load(target).to(tl.pointer_type(tl.int32)) + at, words, mask=at < count)
