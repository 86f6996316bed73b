"""`outrider bench look-ahead`: acceptance of a head's drafts made one round early.

No services are started. The target answers every prompt once, greedily. Serving these answers is
then simulated twice: in lock-step, and with look-ahead in every round. With look-ahead each draft
is made one round early, so the head uses its own features for the tokens that are accepted in
between. A hit rate is the share of verdicts whose outcome is among the first m outcomes that the
drafter would have drafted for. The drafter's code ranks the outcomes by the newest features, and
calibrates the ranking by the previous verdicts.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from outrider_drafter.look_ahead.calibration import PRIOR_SHARPNESS, OutcomeCalibration
from outrider_drafter.state.outcomes import (
    CandidateLayout,
    NodeIndex,
    best_outcomes,
    follow_verdict,
)

from outrider.client.flags import integer_at_least
from outrider.client.local.config import default_dtype
from outrider.client.local.model_files import ModelFiles, find_model
from outrider.engine.heads import (
    DraftHead,
    FeatureProjection,
    load_feature_projection,
    load_head,
)
from outrider.engine.training.answer_generation import (
    AnswerRequest,
    GenerateConfig,
    generate_answers,
)
from outrider.engine.training.data import ChatTokenizer, TrainingSample
from outrider.engine.training.drafting import (
    CHAIN,
    TREE,
    DraftedRows,
    score_trees,
)
from outrider.engine.training.head import TrainableHead
from outrider.engine.training.held_out_report import held_out_report
from outrider.engine.training.parity_check import load_trainable
from outrider.engine.training.serving_report import SimulatedRound, SimulatedVerdict, serving_report
from outrider.engine.training.target import TrainingTarget, load_target
from outrider.errors import InvalidRequestError
from outrider.spec.sampling import Rule
from outrider.spec.tree import path
from outrider_bench.environment import describe
from outrider_bench.models import add_input_arguments
from outrider_bench.prompts import BenchPrompt, load_prompts
from outrider_bench.report import print_progress, print_result

SHAPES: Final = {"chain5": CHAIN, "tree32": TREE}
FAN_OUTS: Final = (4, 8, 16, 32, 64)
CANDIDATES: Final = 32
"""Number of candidate tokens per node. The drafter uses the same number."""
_ROOM: Final = 1 << 20


class OutcomeHits:
    """Counts how often the outcome of a round is among the first outcomes of a ranking."""

    def __init__(self, head: DraftHead) -> None:
        self._head = head
        # One that never learns trusts the head's own probabilities.
        learns = OutcomeCalibration(PRIOR_SHARPNESS[Rule.GREEDY])
        self._rankings = {"calibrated": learns, "plain": OutcomeCalibration()}
        self._hits = {name: [0] * len(FAN_OUTS) for name in self._rankings}
        self._rounds = self._at_root = 0

    def watch(self, what: SimulatedRound) -> None:
        """Count the outcomes of some simulated rounds; see `serving.Watch`."""
        trees = [verdict.tree for verdict in what.verdicts]
        rows = DraftedRows(self._head, what.rows, what.roots)
        found = score_trees(rows, trees, min(CANDIDATES, self._head.config.draft_vocab_size))
        layout = CandidateLayout.of_candidates(
            NodeIndex.of_trees(trees), np.concatenate([one.tokens for one in found])
        )
        logprobs = np.concatenate([one.logprobs for one in found])
        gains = {
            name: ranking.expected_gains(layout, logprobs)
            for name, ranking in self._rankings.items()
        }
        live = [i for i, ended in enumerate(what.ended) if not ended]
        for i in live:
            verdict = what.verdicts[i]
            place = int(layout.roots[i]) + verdict.node + 1
            for name, found_gains in gains.items():
                first = best_outcomes(layout, found_gains, i, room=_ROOM, count=FAN_OUTS[-1])
                right = (first.places == place) & (first.tokens == verdict.token)
                for at, fan_out in enumerate(FAN_OUTS):
                    self._hits[name][at] += bool(right[:fan_out].any())
            self._rounds += 1
            self._at_root += verdict.accepted_len == 0
        for i in live:
            told = emitted(what.verdicts[i])
            self._rankings["calibrated"].learn_from_verdict(
                layout, logprobs, follow_verdict(layout, i, told)
            )

    def rates(self) -> dict[str, object]:
        """Return the number of rounds, the share of them without an accepted token, and the hit
        rates by number of outcomes. `hit_rate_plain` is that of a ranking by the head's own
        probabilities, without calibration."""
        rounds = max(1, self._rounds)
        rates = {
            name: {str(m): round(hits / rounds, 4) for m, hits in zip(FAN_OUTS, found, strict=True)}
            for name, found in self._hits.items()
        }
        return {
            "rounds": self._rounds,
            "ended_at_root": round(self._at_root / rounds, 4),
            "hit_rate": rates["calibrated"],
            "hit_rate_plain": rates["plain"],
        }


def emitted(verdict: SimulatedVerdict) -> list[int]:
    """Return the accepted tokens of a verdict, followed by the next token, which the target
    chose."""
    nodes = path(verdict.tree.parents, verdict.node)
    return [*verdict.tree.tokens[list(nodes)].tolist(), verdict.token]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_input_arguments(parser)
    add = parser.add_argument
    add("--device", default="cpu")
    add("--max-tokens", type=integer_at_least(2), default=128, help="of an answer; default: 128")


class HeadModels(NamedTuple):
    """Target and head that are loaded, with the projection of features and the trainable form of
    the head."""

    files: ModelFiles
    target: TrainingTarget
    head: DraftHead
    projection: FeatureProjection
    trainable: TrainableHead


def load(args: argparse.Namespace) -> HeadModels:
    """Load the model and the head that the flags select. Raises NotFoundError, InvalidRequestError
    or ValueError."""
    files = find_model(args.model, head=args.head)
    if files.head is None:
        raise InvalidRequestError(f"no head ships for {args.model}: give --head DIR")
    dtype: torch.dtype = getattr(torch, args.dtype or default_dtype(args.device))
    target = load_target(files.path, dtype=dtype, device=args.device)
    places: dict[str, Any] = {
        "num_target_layers": target.config.num_layers,
        "dtype": dtype,
        "device": args.device,
    }
    head = load_head(files.head, embedding=target.embedding, lm_head=target.lm_head, **places)
    projection = load_feature_projection(files.head, **places)
    return HeadModels(files, target, head, projection, load_trainable(files.head, head))


def answer_prompts(
    target: TrainingTarget,
    tokenizer: ChatTokenizer,
    prompts: Sequence[BenchPrompt],
    max_tokens: int,
) -> dict[str, list[TrainingSample]]:
    """Return the prompts with their greedy answers, by task. Prompts that exceed the model's
    maximum length are left out."""
    room = target.config.max_position_embeddings - max_tokens
    encoded = tokenizer.encode_turns([prompt.text for prompt in prompts])
    asked = [(p.task, ids) for p, ids in zip(prompts, encoded, strict=True) if len(ids) <= room]
    config = GenerateConfig(max_new_tokens=max_tokens, slots=len(asked), use_graphs=False)
    requests = [AnswerRequest(ids, 0.0) for _, ids in asked]
    answers = generate_answers(target, requests, target.config.eos_token_ids, config)
    tasks: dict[str, list[TrainingSample]] = {}
    for (task, ids), found in zip(asked, answers, strict=True):
        if found is not None and len(found):
            tasks.setdefault(task, []).append(TrainingSample(ids, found))
    return tasks


def run(args: argparse.Namespace) -> None:
    """Run the benchmark and print its result."""
    torch.set_num_threads(args.threads)
    models = load(args)
    prompts = load_prompts(args.prompts, args.limit)
    tasks = answer_prompts(
        models.target, ChatTokenizer(models.files.path), prompts, args.max_tokens
    )
    print_progress(f"{sum(len(samples) for samples in tasks.values())} answers")
    result = {
        "benchmark": "look-ahead",
        **describe(),
        "model": models.files.name,
        "head": models.head.fingerprint,
        "dtype": str(models.target.embedding.dtype).removeprefix("torch."),
        "device": args.device,
        "temperature": 0.0,
        "prompts": args.prompts.name,
        "max_tokens": args.max_tokens,
        **measure(models, tasks),
    }
    print_result(args, result)


def measure(models: HeadModels, tasks: Mapping[str, Sequence[TrainingSample]]) -> dict[str, object]:
    """Return all figures of a head, measured on these answers."""
    taught = held_out_report(models.target, models.trainable, tasks)["all"]
    clean = taught.get("loops_excluded")
    if clean is None:
        raise InvalidRequestError("every answer repeats itself: give other prompts")
    print_progress("accuracy by step: " + " ".join(f"{a:.3f}" for a in clean["accuracy"]))
    hits = {(name, ahead): OutcomeHits(models.head) for name in SHAPES for ahead in (False, True)}
    served = serving_report(
        models.target,
        models.head,
        models.projection,
        tasks,
        SHAPES,
        lambda name, ahead: hits[name, ahead].watch,
    )
    shapes = {}
    for name in SHAPES:
        figures = served["all"][name]
        print_progress(
            f"{name}: " + ", ".join(f"{key} {value:.3f}" for key, value in figures.items())
        )
        stale = hits[name, True].rates()
        print_progress(f"{name}: hit rate by outcomes {stale['hit_rate']}")
        shapes[name] = {
            **{key: round(value, 4) for key, value in figures.items()},
            "by_task": {
                task: {key: round(value, 4) for key, value in by_shape[name].items()}
                for task, by_shape in served.items()
                if task != "all"
            },
            # Outcomes of proposals that were themselves drafted ahead, and of those in lock-step.
            "outcomes": stale,
            "outcomes_lock_step": hits[name, False].rates(),
        }
    return {
        "answers": taught["answers"],
        "loops_left_out": taught["loops"],
        "accuracy": [round(a, 4) for a in clean["accuracy"]],
        "conditional": [round(a, 4) for a in clean["conditional"]],
        "shapes": shapes,
    }
