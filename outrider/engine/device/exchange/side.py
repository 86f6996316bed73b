"""ExchangeSide: buffers, state and lifetime of one side of an exchange, in drafter or verifier."""

from __future__ import annotations

import torch

from outrider.engine.device.exchange.layout import ExchangeShape
from outrider.engine.device.exchange.memory import (
    SharedMemory,
    attach_buffer,
    detach_buffer,
    new_buffer,
)
from outrider.engine.kernels.exchange.buffers import new_state


class ExchangeSide:
    """One side of an exchange: the buffers and the state that kernels of this process's device use.
    The buffers have no memory until `attach` is called."""

    def __init__(self, shape: ExchangeShape, device: torch.device, *, timeout_us: int) -> None:
        """`timeout_us`: maximum duration of a wait on the device, in microseconds."""
        self._layouts = (shape.verdict_layout(), shape.draft_layout())
        self._device = device
        self.verdicts, self.drafts = (new_buffer(layout, device) for layout in self._layouts)
        self.state = new_state(device)
        self._host_control = self.state.host_control.numpy()
        self._host_control[1] = timeout_us
        self._memory: tuple[SharedMemory, ...] = ()

    @property
    def is_open(self) -> bool:
        """Whether an exchange is attached and no round has been missed since, according to the
        device's last report."""
        return bool(self._memory) and bool(self._host_control[2])

    @property
    def is_late(self) -> bool:
        """Whether the last wait on the device timed out, according to the device's last report."""
        return bool(self._memory) and not self._host_control[3]

    def attach(self, *, verdicts: SharedMemory, drafts: SharedMemory) -> None:
        """Start an exchange through this memory, in stream order. `detach` closes the memory."""
        for buffer, layout, memory in zip(
            (self.verdicts, self.drafts), self._layouts, (verdicts, drafts), strict=True
        ):
            attach_buffer(buffer, layout, memory)
        self.state.words.copy_(torch.tensor([0, 1, 0, 1], dtype=torch.int32))
        self._host_control[2:] = 1
        self._memory = (verdicts, drafts)

    def detach(self) -> None:
        """End the exchange and close the memory. Cancels waits on the device, then waits for work
        launched in the current stream. Idempotent."""
        self._host_control[0] = 1
        self.state.words[1].fill_(0)
        if self._device.type == "cuda":
            # Not for the device: other streams may wait for peers of theirs.
            torch.cuda.current_stream(self._device).synchronize()
        self._host_control[0] = 0
        for buffer in (self.verdicts, self.drafts):
            detach_buffer(buffer)
        for memory in self._memory:
            memory.close()
        self._memory = ()
