"""One launch of drafts, and what comes back from it; of sessions and of branches alike.

B rows of a bucket, K chain length, n tree nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.device.drafting.draft_forward import NewRows
from outrider.engine.device.drafting.draft_masks import DraftMasks
from outrider.engine.device.drafting.draft_row_state import Drawing
from outrider.engine.device.drafting.look_ahead_program import AheadProgram
from outrider.engine.device.transfer.buffers import Downloader, Landing
from outrider.engine.draft_sampling import law_limits_for
from outrider_drafter.gpu.device_laws import chains_with_laws
from outrider_drafter.gpu.draft_results import chains, trees
from outrider_drafter.gpu.grammar_masks import Starts, first_masks, fit_chains
from outrider_drafter.gpu.paged_kv import DeviceRows
from outrider_drafter.gpu.shapes import BATCH_SIZES, CHAIN_LENGTHS, Shape
from outrider_drafter.proposers.interface import Drafted
from outrider_drafter.state.outcomes import BRANCH_SIZES
from outrider_drafter.state.session import Session

Grown = tuple[Tensor, Tensor | None]
"""int32 [B, K] tokens of chains; with others [B, K, 1 + A] (see `ChainDraft`); with laws [B, 2K]
tokens and sizes, and the entries (see `ChainLaws`); [B, 3, n] tokens, parents and log-prob bits of
trees."""


class Grower:
    """Grows a shape from new rows and reads it back."""

    def __init__(self, program: AheadProgram, rows: DeviceRows, landing: Landing) -> None:
        """`landing`: where the first tensor of what is grown lands."""
        self._program, self._rows, self._landing = program, rows, landing
        self._downloads = Downloader(rows.tables.device)
        vocabulary = program.forward.vocabulary
        ids = vocabulary.target_ids
        self._target_ids: NDArray[np.int32] = ids.cpu().numpy().astype(np.int32)
        self.masks = DraftMasks(
            levels=CHAIN_LENGTHS[-1],
            max_rows=max(BATCH_SIZES[-1], BRANCH_SIZES[-1]),
            vocab_size=len(vocabulary.draft_columns),
            target_ids=ids,
            device=ids.device,
        )
        """Of the next general launch; they stay for those after it."""

    def grow(self, shape: Shape, rows: NewRows, drawing: Drawing | None, *, general: bool) -> Grown:
        """Launch a draft and its way down; looks at no value. general: whether sessions may warp
        their logits, be in a grammar (what `masks` allows), or share the target's noise in
        trees."""
        grown = self._grown(shape, rows, drawing, general=general)
        self._landing.put(grown[0])
        return grown

    def _grown(
        self, shape: Shape, rows: NewRows, drawing: Drawing | None, *, general: bool
    ) -> Grown:
        state, warp = self._rows.sampling, self._rows.warp.state if general else None
        legal = self.masks if general else None
        if shape.top_k == 1:
            chain = self._program.chain(
                rows,
                state=state,
                length=shape.depth,
                warp=warp,
                law_limits=law_limits_for(shape.depth) if shape.with_law else None,
                drawing=drawing,
                legal=legal,
                with_others=shape.with_others,
            )
            if chain.others is not None:
                return torch.cat((chain.tokens[:, :, None], chain.others), dim=2), None
            if chain.laws is None:
                return chain.tokens, None
            return torch.cat((chain.tokens, chain.laws.sizes), dim=1), chain.laws.entries
        tree = self._program.tree(
            rows,
            state=state,
            num_nodes=shape.num_nodes,
            top_k=shape.top_k,
            depth=shape.depth,
            warp=warp,
            coupled=general,
            drawing=drawing,
            legal=legal,
        )
        bits = tree.logprobs.view(torch.int32)
        return torch.stack((tree.tokens, tree.parents, bits), dim=1), None

    def mask(self, shape: Shape, starts: Starts, size: int) -> None:
        """Tell the next general launch, of a bucket's size, what its drafts may begin with."""
        levels = 1 if shape.top_k > 1 else min(shape.depth, self.masks.levels)
        self.masks.fill(first_masks(starts, levels), size)

    def drafted(
        self,
        shape: Shape,
        sessions: Sequence[Session],
        lengths: NDArray[np.int64],
        words: NDArray[np.int32],
        entries: Tensor | None,
        starts: Starts = (),
    ) -> Drafted:
        """The first rows of what came down, chains cut to `lengths`, one row a session; those that
        begin in a grammar are mended."""
        words = words[: len(sessions)]
        if entries is not None:
            # Their entries come by another download, which may take this one's memory.
            drafts = chains_with_laws(
                words.copy(), entries, lengths.tolist(), self._target_ids, self._downloads
            )
            return Drafted.of(list(zip(sessions, drafts, strict=True)))
        if shape.top_k == 1:
            others = words[:, :, 1:] if words.ndim == 3 else None
            tokens = words if others is None else words[:, :, 0]
            tokens, lengths = fit_chains(starts, tokens, lengths, others)
            return chains(sessions, lengths, tokens)
        return trees(sessions, words)
