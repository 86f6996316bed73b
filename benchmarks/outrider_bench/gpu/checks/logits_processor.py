"""Check and time the logits-processor kernels on a GPU.

    python -m outrider_bench.gpu.checks.logits_processor [--out FILE]

Rows are checked against the host's logits processor, bit for bit, and against float64
probabilities. Times are microseconds of one call inside a CUDA graph (the median replay of many
calls). The run takes less than two minutes.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from outrider.engine.device.slots.logits_slots import LogitsSlots
from outrider.engine.kernels.logits_processor.draft_path import OutputPath
from outrider.engine.kernels.logits_processor.process import process_logits
from outrider.engine.kernels.sampling import scaled_scores
from outrider.engine.kernels.session_tensors import (
    NUM_STREAMS,
    RULE_COUPLED,
    RULE_GREEDY,
    SamplingState,
)
from outrider.engine.logits_processor import TokenHistory, apply_logits_processor
from outrider.errors import FailedPreconditionError
from outrider.spec.sampling import SamplingParams
from outrider_bench.environment import describe
from outrider_bench.gpu.checks.sampling import microseconds
from outrider_bench.report import format_table

SESSIONS = (1, 8, 32, 64)
NODES = 4
VOCABULARIES = (49_152, 128_256)
SCALES = (0.5, 3.0)
"""Standard deviations of the random logits. The first one makes a flat distribution, the second one
a distribution like a language model's."""
HISTORY = 600
SETTINGS: dict[str, SamplingParams] = {
    "nothing": SamplingParams(),
    "top-p .9": SamplingParams(temperature=0.8, top_p=0.9),
    "top-p .999": SamplingParams(temperature=0.8, top_p=0.999),
    "top-k 50": SamplingParams(temperature=0.8, top_k=50),
    "top-k 20000": SamplingParams(temperature=0.8, top_k=20_000),
    "min-p .05": SamplingParams(temperature=0.8, min_p=0.05),
    "penalties": SamplingParams(repetition_penalty=1.2, frequency_penalty=0.3),
    "bias 300": SamplingParams(logit_bias=tuple((17 * i, 1.5) for i in range(300))),
    "bans 1024": SamplingParams(banned_ids=tuple(range(1024))),
    "all": SamplingParams(
        temperature=0.8,
        top_k=100,
        top_p=0.9,
        min_p=0.01,
        presence_penalty=0.5,
        banned_ids=(1, 2),
        logit_bias=((3, 1.0),),
    ),
}


class LogitsCase:
    """Logits and state of several sessions with the same sampling parameters. Each session has a
    chain of NODES rows."""

    def __init__(
        self, params: SamplingParams, sessions: int, vocab: int, scale: float, device: torch.device
    ) -> None:
        self.params = params
        rng = np.random.default_rng(sessions)
        rows = sessions * NODES
        self.logits = torch.randn(rows, vocab, device=device) * scale
        self.prompts = rng.integers(0, vocab, (sessions, HISTORY)).astype(np.int32)
        self.outputs = rng.integers(0, vocab, (sessions, HISTORY)).astype(np.int32)
        self.tokens = rng.integers(0, vocab, (sessions, NODES - 1)).astype(np.int32)
        held = LogitsSlots(sessions + 1, vocab, device)
        for slot in range(sessions):
            held.begin_session(
                slot, params, prompt_ids=self.prompts[slot], output_ids=self.outputs[slot]
            )
        self.warp = held.state
        rule = RULE_COUPLED if params.temperature else RULE_GREEDY
        self.state = SamplingState(
            stream_keys=torch.zeros((sessions + 1, NUM_STREAMS), dtype=torch.int64, device=device),
            temperatures=torch.full((sessions + 1,), params.temperature, device=device),
            rules=torch.full((sessions + 1,), rule, dtype=torch.int32, device=device),
        )
        self.slots = torch.arange(sessions, dtype=torch.int32, device=device)
        self.positions = torch.full((rows,), 2 * HISTORY, dtype=torch.int32, device=device)
        self.path = OutputPath(torch.from_numpy(self.tokens).to(device))

    def run(self, logits: Tensor) -> None:
        """Process the logits in place."""
        process_logits(
            logits,
            self.warp,
            self.state,
            self.slots,
            self.positions,
            rows_per_slot=NODES,
            path=self.path,
        )

    def agrees(self) -> tuple[bool, bool]:
        """Return two results: whether all scores equal those of the host's logits processor bit for
        bit, and whether top-p keeps the smallest set of tokens whose probability reaches top_p. The
        second one is computed in float64, with a tolerance of 10^-4."""
        found = self.logits.clone()
        self.run(found)
        exact = near = True
        for row in range(len(found)):
            owner, place = divmod(row, NODES)
            history = TokenHistory(
                prompt_ids=self.prompts[owner],
                output_ids=self.outputs[owner],
                path_ids=tuple(self.tokens[owner, :place].tolist()),
            )
            expected = apply_logits_processor(
                self.logits[row : row + 1].cpu(), [self.params], [history]
            )
            scores = found[row : row + 1].cpu()
            if self.params.temperature:
                scores = scaled_scores(scores, torch.tensor([self.params.temperature]))
            exact &= torch.equal(scores, expected)
            near &= self._near(row, found[row])
        return exact, near

    def _near(self, row: int, found: Tensor) -> bool:
        params = self.params
        if params.top_p == 1.0 or params.top_k:
            return True
        probs = (self.logits[row].double() / params.temperature).softmax(-1)
        inside = probs[found > -torch.inf]
        mass = float(inside.sum())
        return mass > params.top_p - 1e-4 and mass - float(inside.min()) < params.top_p + 1e-4


def check(device: torch.device) -> list[tuple[str, bool]]:
    """Return (name of a check, whether it passed) for both checks of every setting, vocabulary and
    scale."""
    found = []
    for name, params in SETTINGS.items():
        for vocab in VOCABULARIES:
            for scale in SCALES:
                exact, near = LogitsCase(params, 2, vocab, scale, device).agrees()
                found.append((f"{name}, V={vocab}, scale {scale}: the host's set", exact))
                found.append((f"{name}, V={vocab}, scale {scale}: float64", near))
    return found


def time_settings(device: torch.device) -> list[list[object]]:
    """Return a table row for each setting, vocabulary and scale: [setting, V, scale, and the
    microseconds for each number of sessions in SESSIONS]."""
    result: list[list[object]] = []
    for name, params in SETTINGS.items():
        for vocab in VOCABULARIES:
            for scale in SCALES:
                row: list[object] = [name, vocab, scale]
                for sessions in SESSIONS:
                    case = LogitsCase(params, sessions, vocab, scale, device)
                    copied = microseconds(case.logits.clone)
                    row.append(round(microseconds(partial(_process_copy, case)) - copied, 2))
                result.append(row)
    return result


def _process_copy(case: LogitsCase) -> None:
    """Process a copy of the logits, because rows that were already processed take less time."""
    case.run(case.logits.clone())


def main() -> None:
    """Check, measure and print a report. Raises FailedPreconditionError without a CUDA device."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise FailedPreconditionError("the check needs a CUDA device", reason="NO_DEVICE")
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    found = check(device)
    failed = [name for name, good in found if not good]
    print(
        f"{len(found) - len(failed)} of {len(found)} checks agree", *failed, sep="\n  ", flush=True
    )
    names = ("setting", "V", "scale", *(f"{sessions}x{NODES} us" for sessions in SESSIONS))
    times = time_settings(device)
    print(format_table(names, times), flush=True)
    if args.out is not None:
        figures = {
            "environment": describe(),
            "device": torch.cuda.get_device_name(device),
            "failed_checks": failed,
            "times": [dict(zip(names, row, strict=True)) for row in times],
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
