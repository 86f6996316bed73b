"""Rows of sessions with every sampling parameter, as the host and as the device see them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.device.slots.logits_slots import LogitsSlots
from outrider.engine.kernels.logits_processor.draft_path import OutputPath
from outrider.engine.kernels.sampling import scaled_scores
from outrider.engine.kernels.session_tensors import (
    AllowedTokenBits,
    LogitsProcessorState,
    SamplingState,
)
from outrider.engine.logits_processor import TokenHistory, apply_logits_processor, edit_logits
from outrider.spec.sampling import SamplingParams
from tests.reference.device_rounds import sampling_state

NODES = 4
PARENTS = (-1, 0, 0, 1)
"""Row 0 is the root; the parent of each row."""
BANNED_FIRST = (1, 9)


class WarpCase(NamedTuple):
    """Sessions of NODES rows each."""

    logits: Tensor
    state: SamplingState
    warp: LogitsProcessorState
    slots: Tensor
    positions: Tensor
    path: OutputPath
    expected: Tensor
    """What the host's logits processor makes of each row: scores, divided by the temperature; the
    edited logits of greedy sessions."""
    legal: AllowedTokenBits | None = None

    def scores(self, warped: Tensor) -> Tensor:
        """Warped logits as the host's logits processor returns them."""
        owners = self.slots.long().repeat_interleave(NODES)
        heat = self.state.temperatures[owners].to(warped.device)
        return torch.where(heat[:, None] > 0, scaled_scores(warped, heat), warped)


def odd_rows(vocab: int, generator: torch.Generator) -> list[Tensor]:
    """Rows with everything that can go wrong, of at least 10 columns."""
    rows = [torch.randn(vocab, generator=generator) * scale for scale in (0.01, 3.0, 3.0, 30.0)]
    rows += [torch.full((vocab,), value) for value in (torch.nan, -torch.inf, torch.inf, 2.0)]
    ties = torch.randint(-3, 4, (vocab,), generator=generator).float()
    rows += [ties, -ties.abs() * 0.0, ties * 1e30, rows[1] * 1e20, rows[1] + 1e4]
    holes = rows[1].clone()
    holes[::3], holes[1::5], holes[7] = torch.nan, -torch.inf, torch.inf
    lonely = torch.full((vocab,), -torch.inf)
    lonely[vocab // 2] = -5.0
    tiny = rows[1] * 1e-38
    return [*rows, holes, lonely, tiny]


def warp_case(
    params: list[SamplingParams],
    vocab: int,
    *,
    seed: int = 0,
    rows: list[Tensor] | None = None,
    grammars: bool = False,
) -> WarpCase:
    """A session for each of `params`, with random tokens on the paths of a small tree; every other
    one is in a grammar, if there are any."""
    generator = torch.Generator().manual_seed(seed)
    rng = np.random.default_rng(seed)
    batch = len(params)
    rows = odd_rows(vocab, generator) if rows is None else rows
    pick = torch.randint(0, len(rows), (batch * NODES,), generator=generator)
    logits = torch.stack([rows[i] for i in pick.tolist()])
    slots = torch.randperm(batch, generator=generator).to(torch.int32)
    state = sampling_state(params, slots, batch + 1)
    held = LogitsSlots(batch + 1, vocab, torch.device("cpu"))
    tokens = rng.integers(-1, min(vocab, 6), (batch, NODES)).astype(np.int32)
    depth = np.array([0, 1, 1, 2])
    positions = np.zeros((batch, NODES), np.int32)
    masks = legal_masks(rng, batch * NODES, vocab)
    expected = []
    for index, one in enumerate(params):
        prompt, output = rng.integers(0, vocab, 8), rng.integers(0, vocab, 6) % 12
        start = int(rng.integers(10, 20))
        until = int(rng.choice([0, start + 1, start + 9]))
        slot = int(slots[index])
        held.begin_session(
            slot,
            one,
            prompt_ids=prompt,
            output_ids=output[:2],
            banned_first=BANNED_FIRST if until else (),
            banned_until=until,
            allowed_tokens=grammars and index % 2 == 0,
        )
        held.count_tokens([slot], [output[2:]])
        positions[index] = start + depth
        for place in range(NODES):
            at = int(positions[index, place])
            history = TokenHistory(
                prompt_ids=prompt.astype(np.int32),
                output_ids=output.astype(np.int32),
                path_ids=tuple(int(tokens[index, n]) for n in _ancestors(place)),
                banned_now=BANNED_FIRST if at < until else (),
                allowed_tokens=masks[index * NODES + place]
                if grammars and index % 2 == 0
                else None,
            )
            row = logits[index * NODES + place : index * NODES + place + 1]
            made = apply_logits_processor if one.temperature else edit_logits
            expected.append(made(row, [one], [history])[0])
    mask = np.zeros((NODES, NODES), np.uint8)
    for place in range(NODES):
        mask[place, [0, *_ancestors(place)]] = 1
    path = OutputPath(
        torch.from_numpy(tokens)[:, 1:], torch.from_numpy(mask).repeat(batch, 1, 1)[:, :, 1:]
    )
    return WarpCase(
        logits,
        state,
        held.state,
        slots,
        torch.from_numpy(positions).flatten(),
        path,
        torch.stack(expected),
        _shuffled(masks, generator) if grammars else None,
    )


def legal_masks(rng: np.random.Generator, count: int, vocab: int) -> NDArray[np.uint32]:
    """uint32 [count, W]: masks that allow nearly all, some, two, one or none of the ids."""
    allowed = np.zeros((count, -(-vocab // 32) * 32), dtype=np.uint8)
    for row in allowed:
        share = rng.choice([0.0, 0.1, 0.5, 0.99])
        row[:vocab] = rng.random(vocab) < share
        if not share:
            row[rng.integers(0, vocab, int(rng.integers(0, 3)))] = 1
    return np.packbits(allowed, axis=1, bitorder="little").view("<u4").astype(np.uint32)


def _shuffled(masks: NDArray[np.uint32], generator: torch.Generator) -> AllowedTokenBits:
    """Rows of bits lie in any order."""
    order = torch.randperm(len(masks), generator=generator)
    bits = torch.empty(masks.shape, dtype=torch.int32)
    bits[order] = torch.from_numpy(masks.view(np.int32))
    return AllowedTokenBits(bits, order.to(torch.int32))


def _ancestors(place: int) -> list[int]:
    """The row and those above it, but for the root, top down."""
    found: list[int] = []
    while place > 0:
        found.append(place)
        place = PARENTS[place]
    return found[::-1]
