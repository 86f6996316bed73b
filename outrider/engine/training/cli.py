"""Command `outrider train-head`: answers, vocabulary, training, metrics, parity check."""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider.engine.heads import (
    DraftHead,
    default_tap_layers,
    load_feature_projection,
    load_head,
)
from outrider.engine.training.answer_generation import (
    AnswerRequest,
    GenerateConfig,
    generate_answers,
)
from outrider.engine.training.data import (
    ChatTokenizer,
    TrainingSample,
    choose_shape,
    drop_looping_samples,
    load_samples,
    read_prompts,
    save_samples,
)
from outrider.engine.training.drafting import CHAIN, TREE
from outrider.engine.training.export import head_config_for, save_head
from outrider.engine.training.head import TrainableHead
from outrider.engine.training.held_out_report import held_out_report
from outrider.engine.training.parity_check import check_parity, load_trainable
from outrider.engine.training.serving_report import serving_report
from outrider.engine.training.target import TrainingTarget, load_target
from outrider.engine.training.trainer import (
    DEEP_SHARE,
    STEP_DECAY,
    UNROLL_STEPS,
    WHOLE_STEPS,
    TrainConfig,
    Trainer,
)
from outrider.engine.training.vocab import TrainingVocabulary, build_vocabulary, given_vocabulary
from outrider.errors import OutriderError

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_DRAFT_VOCABULARY = 16384
_RATE = 1e-3
_RATE_OF_A_HEAD = 3e-4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `outrider train-head` to a parser."""
    add = parser.add_argument
    add("--target", type=Path, required=True, help="Directory of the target model.")
    add(
        "--prompts",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="JSONL files with training prompts.",
    )
    add("--out", type=Path, help="Output directory for the head, reports and answers.")
    add("--device", default="cpu", help="torch device (default: %(default)s).")
    add("--dtype", choices=sorted(_DTYPES), help="Compute dtype (default: bfloat16 on cuda).")
    add("--seed", type=int, default=0, help="Random seed (default: %(default)s).")
    add("--head", type=Path, help="Draft head to fine-tune, to evaluate or to check.")
    add(
        "--tap-layers",
        type=int,
        nargs="+",
        help="0-based target layers whose hidden states feed a new head (default: 1, L//2-1, "
        "L-4 of L layers).",
    )
    add(
        "--draft-vocab-size",
        type=int,
        help=f"Draft vocabulary size of a new head (default: {_DRAFT_VOCABULARY}).",
    )
    add(
        "--eval-prompts",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="JSONL files with held-out prompts for evaluation.",
    )
    add("--no-compile", action="store_true", help="Disable torch.compile and CUDA graphs.")
    answers = parser.add_argument_group("answers")
    add = answers.add_argument
    add("--answers", type=Path, help="Train on the answers file of an earlier run.")
    add("--answers-only", action="store_true", help="Stop once the answers are stored.")
    add(
        "--max-new-tokens",
        type=int,
        default=256,
        help="Maximum number of tokens of an answer (default: %(default)s).",
    )
    add(
        "--max-prompt-tokens",
        type=int,
        default=512,
        help="Longer prompts are left out of training (default: %(default)s).",
    )
    add(
        "--temperature",
        type=float,
        default=0.8,
        help="Temperature of sampled answers (default: %(default)s).",
    )
    add(
        "--samples-per-prompt",
        type=int,
        default=2,
        help="Answers per prompt: the first is greedy, the others are sampled "
        "(default: %(default)s).",
    )
    add(
        "--self-prompts",
        type=int,
        default=0,
        help="Number of additional prompts that are sampled from the target "
        "(default: %(default)s).",
    )
    add(
        "--slots",
        type=int,
        default=1024,
        help="Number of answers that are decoded at the same time (default: %(default)s).",
    )
    add("--generate-seconds", type=float, help="Start no further answers after this many seconds.")
    training = parser.add_argument_group("training")
    add = training.add_argument
    add("--steps", type=int, default=2000, help="Maximum number of updates (default: %(default)s).")
    add("--train-seconds", type=float, help="Maximum training time, in seconds.")
    add(
        "--learning-rates",
        type=float,
        nargs="+",
        help="Learning rate; of several, the best in short trial runs is used "
        f"(default: {_RATE:g}, or {_RATE_OF_A_HEAD:g} with --head).",
    )
    add(
        "--trial-steps",
        type=int,
        default=150,
        help="Number of updates of each trial run of a learning rate (default: %(default)s).",
    )
    add(
        "--warmup-steps",
        type=int,
        default=50,
        help="Number of learning-rate warmup updates (default: %(default)s).",
    )
    add(
        "--log-every",
        type=int,
        default=50,
        help="Number of updates between logged metrics (default: %(default)s).",
    )
    add(
        "--tokens-per-batch",
        type=int,
        default=32768,
        help="Number of tokens in a batch (default: %(default)s).",
    )
    add(
        "--row-len",
        type=int,
        default=1024,
        help="Length in tokens of a batch row, into which several samples are packed; longer "
        "samples are left out (default: %(default)s).",
    )
    add(
        "--unroll",
        type=int,
        nargs=2,
        default=UNROLL_STEPS,
        metavar=("EARLY", "LATE"),
        help="Number of unrolled draft steps in the first and in the second half of the training "
        "(default: %(default)s). Look-ahead needs twice the draft length plus one.",
    )
    add(
        "--whole-steps",
        type=int,
        default=WHOLE_STEPS,
        help="Number of draft steps that use the whole batch (default: %(default)s).",
    )
    add(
        "--deep-share",
        type=float,
        default=DEEP_SHARE,
        help="Share of the batch that all later draft steps use (default: %(default)s).",
    )
    add(
        "--step-decay",
        type=float,
        default=STEP_DECAY,
        metavar="W",
        help="Draft step j has the weight W ** j in the loss (default: %(default)s).",
    )
    evaluating = parser.add_argument_group("evaluation of a finished head")
    add = evaluating.add_argument
    add(
        "--evaluate",
        action="store_true",
        help="Do not train; evaluate --head on --eval-prompts.",
    )
    add("--eval-limit", type=int, help="Maximum number of prompts to use from each file.")
    checking = parser.add_argument_group("parity check")
    add = checking.add_argument
    add(
        "--check",
        action="store_true",
        help="Do not train; compare the training and the serving implementation of --head for "
        "--prompt.",
    )
    add("--prompt", help="Prompt text for --check.")


def main(args: argparse.Namespace) -> int:
    """Run `outrider train-head`. Return the exit code: 0 on success, 1 if the parity check fails, 2
    if the input is invalid."""
    try:
        return _dispatch(args)
    except (OutriderError, ValueError, OSError) as error:
        logger.error("%s", error)
        return 2


def _dispatch(args: argparse.Namespace) -> int:
    device = torch.device(args.device)
    default = "float32" if args.check or device.type == "cpu" else "bfloat16"
    dtype = _DTYPES[args.dtype or default]
    if args.check:
        if args.head is None or not args.prompt:
            raise ValueError("--check needs --head and --prompt")
        return check_parity(args.target, args.head, args.prompt, dtype=dtype, device=device)
    if args.evaluate:
        if args.head is None or args.out is None or not args.eval_prompts:
            raise ValueError("--evaluate needs --head, --eval-prompts and --out")
        target = load_target(args.target, dtype=dtype, device=device)
        _Run(args, target, ChatTokenizer(args.target)).evaluate()
        return 0
    if args.out is None or not (args.prompts or args.self_prompts or args.answers):
        raise ValueError("training needs --out, and --prompts, --self-prompts or --answers")
    if args.head is not None and (args.tap_layers or args.draft_vocab_size):
        raise ValueError("--tap-layers and --draft-vocab-size are for new heads, not for --head")
    target = load_target(args.target, dtype=dtype, device=device)
    _Run(args, target, ChatTokenizer(args.target)).train()
    return 0


class _Run:
    """One run of the training command. Each step adds its results to the report."""

    def __init__(
        self, args: argparse.Namespace, target: TrainingTarget, tokenizer: ChatTokenizer
    ) -> None:
        self._args = args
        self._target = target
        self._tokenizer = tokenizer
        self._fast = target.device.type == "cuda" and not args.no_compile
        self._report: dict[str, Any] = {}
        args.out.mkdir(parents=True, exist_ok=True)

    def evaluate(self) -> None:
        """Evaluate a finished head with the teacher-forced training forward and with the drafts of
        the serving code, and write the report."""
        target = self._target
        head = self._load_head()
        projection = load_feature_projection(self._args.head, **self._positions())
        tasks = self._evaluation_answers()
        shapes = {"chain_5": CHAIN, "tree_32": TREE}
        trainable = load_trainable(self._args.head, head)
        self._report["held_out"] = held_out_report(target, trainable, tasks)
        self._report["serving"] = serving_report(target, head, projection, tasks, shapes)
        self._write_report("evaluation.json")

    def train(self) -> None:
        """Generate answers, build or load the head, train and save it, and write its metrics."""
        args = self._args
        config = self._config()
        samples = self._training_samples()
        if args.answers_only:
            self._write_report()
            return
        tasks = self._evaluation_answers()
        head = self._new_head(samples) if args.head is None else self._given_head(samples)
        shape = choose_shape(samples, args.row_len, args.tokens_per_batch)
        self._report["batch"] = asdict(shape)
        trainer = Trainer(self._target, samples, shape, compile=self._fast)
        rates = self._rates()
        if len(rates) > 1:
            rate, trials = trainer.pick_learning_rate(head, rates, args.trial_steps, config)
            self._report["trials"] = trials
            config = replace(config, learning_rate=rate)
        self._report["config"] = asdict(config)

        def checkpoint(step: int) -> None:
            save_head(args.out / "checkpoint", head)

        result = trainer.run(head, config, checkpoint)
        save_head(args.out, head)
        self._report["run"] = asdict(result)
        self._write_report()
        if tasks:
            self._report["held_out"] = held_out_report(self._target, head, tasks)
            self._write_report()

    def _config(self) -> TrainConfig:
        args = self._args
        return TrainConfig(
            steps=args.steps,
            seconds=args.train_seconds,
            learning_rate=self._rates()[0],
            warmup_steps=args.warmup_steps,
            unroll_early=args.unroll[0],
            unroll_late=args.unroll[1],
            whole_steps=args.whole_steps,
            deep_share=args.deep_share,
            step_decay=args.step_decay,
            seed=args.seed,
            log_every=args.log_every,
        )

    def _rates(self) -> list[float]:
        given: list[float] | None = self._args.learning_rates
        return given or [_RATE if self._args.head is None else _RATE_OF_A_HEAD]

    def _training_samples(self) -> list[TrainingSample]:
        args = self._args
        started = time.monotonic()
        if args.answers is not None:
            samples = load_samples(args.answers)
        else:
            samples = self._answer(self._requests())
            save_samples(args.out / "answers.npz", samples)
        kept = [s for s in drop_looping_samples(samples) if len(s) <= args.row_len]
        if not kept:
            raise ValueError("no usable answers: give more prompts or allow more tokens")
        self._report["samples"] = {
            "answers": len(samples),
            "kept": len(kept),
            "answer_tokens": sum(len(s.answer) for s in kept),
            "tokens": sum(len(s) for s in kept),
            "seconds": time.monotonic() - started,
        }
        logger.info("samples: %s", self._report["samples"])
        return kept

    def _requests(self) -> list[AnswerRequest]:
        """Return the answer requests of all prompts. The first request of a prompt is greedy, the
        others have the temperature from the command line."""
        args = self._args
        prompts = read_prompts(args.prompts, args.samples_per_prompt)
        texts = [p.text for p in prompts]
        counts = [p.samples for p in prompts]
        own = self._self_prompts(set(texts))
        texts += own
        counts += [args.samples_per_prompt] * len(own)
        requests = []
        for ids, count in zip(self._tokenizer.encode_turns(texts), counts, strict=True):
            if len(ids) <= args.max_prompt_tokens:
                requests.append(AnswerRequest(ids, 0.0))
                requests += [AnswerRequest(ids, args.temperature)] * (count - 1)
        self._report["prompts"] = {"given": len(prompts), "self_made": len(own)}
        return requests

    def _self_prompts(self, known: set[str]) -> list[str]:
        """Let the target write user messages at temperature 1. Return those that are complete and
        neither in `known` nor among the held-out prompts."""
        args = self._args
        if not args.self_prompts:
            return []
        prefix = self._tokenizer.user_prefix()
        limit = None if args.generate_seconds is None else args.generate_seconds / 4
        written = self._generate([AnswerRequest(prefix, 1.0)] * args.self_prompts, limit)
        stops = set(self._target.config.eos_token_ids)
        texts = set()
        for ids in written:
            if ids is not None and len(ids) > 4 and int(ids[-1]) in stops:
                texts.add(self._tokenizer.decode(ids[:-1].tolist()).strip())
        blocked = {p.text for p in read_prompts(args.eval_prompts)}
        return sorted(t for t in texts if len(t) > 10 and t not in known and t not in blocked)

    def _evaluation_answers(self) -> dict[str, list[TrainingSample]]:
        """Return a dict from the name of each file with held-out prompts to the greedy answers to
        its prompts."""
        tasks = {}
        for file in self._args.eval_prompts:
            texts = [p.text for p in read_prompts([file])][: self._args.eval_limit]
            limit = self._args.row_len - self._args.max_new_tokens
            prompts = [ids for ids in self._tokenizer.encode_turns(texts) if len(ids) <= limit]
            tasks[file.stem] = self._answer(
                [AnswerRequest(ids, 0.0) for ids in prompts], timed=False
            )
        return tasks

    def _answer(
        self, requests: Sequence[AnswerRequest], timed: bool = True
    ) -> list[TrainingSample]:
        answers = self._generate(requests, self._args.generate_seconds if timed else None)
        return [
            TrainingSample(request.prompt, answer)
            for request, answer in zip(requests, answers, strict=True)
            if answer is not None and len(answer)
        ]

    def _generate(
        self, requests: Sequence[AnswerRequest], deadline_s: float | None
    ) -> list[np.ndarray | None]:
        config = GenerateConfig(
            max_new_tokens=self._args.max_new_tokens,
            slots=max(1, min(self._args.slots, len(requests))),
            seed=self._args.seed,
            deadline_s=deadline_s,
            use_graphs=self._fast,
        )
        return list(
            generate_answers(self._target, requests, self._target.config.eos_token_ids, config)
        )

    def _new_head(self, samples: Sequence[TrainingSample]) -> TrainableHead:
        args, shape = self._args, self._target.config
        size = min(args.draft_vocab_size or _DRAFT_VOCABULARY, shape.vocab_size)
        vocabulary = build_vocabulary(
            (s.answer for s in samples), shape.vocab_size, size, shape.eos_token_ids
        )
        self._report_vocabulary(vocabulary)
        taps = tuple(args.tap_layers or default_tap_layers(shape.num_layers))
        torch.manual_seed(args.seed)
        head = TrainableHead(
            head_config_for(shape, size, taps), torch.from_numpy(vocabulary.target_ids)
        )
        head.initialise_from(self._target)
        return head.to(self._target.device)

    def _given_head(self, samples: Sequence[TrainingSample]) -> TrainableHead:
        """Return the head of --head, with its own tap layers and draft vocabulary, for
        fine-tuning."""
        head = load_trainable(self._args.head, self._load_head())
        ids = head.target_ids.cpu().numpy()
        size = self._target.config.vocab_size
        self._report_vocabulary(given_vocabulary((s.answer for s in samples), size, ids))
        return head

    def _load_head(self) -> DraftHead:
        embedding, lm_head = self._target.embedding, self._target.lm_head
        return load_head(self._args.head, embedding=embedding, lm_head=lm_head, **self._positions())

    def _positions(self) -> dict[str, Any]:
        target = self._target
        return {
            "num_target_layers": target.config.num_layers,
            "dtype": target.embedding.dtype,
            "device": target.device,
        }

    def _report_vocabulary(self, vocabulary: TrainingVocabulary) -> None:
        size, coverage = len(vocabulary.target_ids), vocabulary.coverage
        self._report["vocabulary"] = {"size": size, "coverage": coverage}
        logger.info("draft vocabulary of %d covers %.4f", size, coverage)

    def _write_report(self, name: str = "report.json") -> None:
        text = json.dumps(self._report, indent=1)
        (self._args.out / name).write_text(text + "\n", encoding="utf-8")
