"""Baseline of plain decoding with transformers' `generate`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


class TransformersBaseline:
    """Target model run by the transformers library, with the same weights, dtype and number of
    threads as Outrider."""

    def __init__(self, model: Path, *, dtype: str, threads: int) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        self._model.eval()

    def generate(self, token_ids: Sequence[int], max_tokens: int) -> tuple[list[int], float]:
        """Return the tokens of the greedy answer and the seconds that it took. The answer ends at
        the end-of-turn token or after `max_tokens`."""
        inputs = torch.tensor([list(token_ids)])
        began = time.perf_counter()
        with torch.inference_mode():
            output = self._model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                do_sample=False,
                max_new_tokens=max_tokens,
                pad_token_id=0,
            )
        seconds = time.perf_counter() - began
        return output[0, inputs.shape[1] :].tolist(), seconds
