"""Training data: prompts, chat template, and packing of samples into fixed-shape batches.

A sample consists of the token ids of a prompt and of its answer. A row of a batch holds several
samples one after another; a document id for each position says to which sample it belongs.

Shapes: B rows, S positions per row, Q selected positions per row (those that predict a token of an
answer).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

TokenIdArray = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class TrainingPrompt:
    """One user message, for which `samples` answers are generated. The first answer is greedy, the
    others are sampled."""

    text: str
    samples: int = 1


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """A tokenized prompt with one answer of the target."""

    prompt: TokenIdArray
    answer: TokenIdArray

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


def read_prompts(files: Sequence[Path], default_samples: int = 1) -> list[TrainingPrompt]:
    """Read training prompts from JSONL files, without duplicates.

    A line has a field `prompt` and optionally `samples` (else `default_samples`), or a field
    `turns`, a list of which only the first item is used.
    """
    seen: dict[str, TrainingPrompt] = {}
    for file in files:
        # Not splitlines(): JSON strings may hold the other characters that it splits at.
        for line in file.read_text(encoding="utf-8").strip("\n").split("\n"):
            row = json.loads(line)
            texts = [row["prompt"]] if "turns" not in row else row["turns"][:1]
            for text in texts:
                seen.setdefault(
                    text, TrainingPrompt(text, int(row.get("samples", default_samples)))
                )
    return list(seen.values())


class ChatTokenizer:
    """The tokenizer and chat template of a target model, read from its directory."""

    def __init__(self, directory: Path) -> None:
        import jinja2.sandbox
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
        template = config.get("chat_template")
        separate = directory / "chat_template.jinja"
        if separate.is_file():
            template = separate.read_text(encoding="utf-8")
        if not isinstance(template, str):
            raise ValueError(f"{directory} has no chat template")
        env = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        self._template = env.from_string(template)
        self._tokens = {
            k: _token_text(config.get(k)) for k in ("bos_token", "eos_token", "pad_token")
        }

    def encode_text(self, text: str) -> TokenIdArray:
        """Return the token ids of a text, without the chat template. The text may contain special
        tokens."""
        return np.asarray(self.tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def encode_turns(self, texts: Sequence[str]) -> list[TokenIdArray]:
        """Return the token ids of one prompt for each text: the text as a user message in the chat
        template, then the header of the assistant's answer."""
        rendered = [self._render(text, True) for text in texts]
        encoded = self.tokenizer.encode_batch(rendered, add_special_tokens=False)
        return [np.asarray(e.ids, dtype=np.int32) for e in encoded]

    def user_prefix(self) -> TokenIdArray:
        """Return the token ids of the chat template before the user's text. If the target continues
        them, it writes a user message."""
        marker = "OUTRIDER-MARKER"
        return self.encode_text(self._render(marker, False).split(marker)[0])

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def _render(self, text: str, generation: bool) -> str:
        message = [{"role": "user", "content": text}]
        return self._template.render(
            messages=message, add_generation_prompt=generation, **self._tokens
        )


def _token_text(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token or "")


def repeated_share(answer: TokenIdArray, width: int = 8) -> float:
    """Return the share of the answer's n-grams of `width` tokens that repeat an earlier one. It is
    near 1 if the answer loops."""
    if len(answer) < 2 * width:
        return 0.0
    grams = np.lib.stride_tricks.sliding_window_view(answer, width)
    return 1.0 - len(np.unique(grams, axis=0)) / len(grams)


def drop_looping_samples(
    samples: Sequence[TrainingSample], limit: float = 0.5
) -> list[TrainingSample]:
    """Return the samples whose answer has at least two tokens and does not loop, which means that
    its `repeated_share` is at most `limit`."""
    return [s for s in samples if len(s.answer) >= 2 and repeated_share(s.answer) <= limit]


def save_samples(path: Path, samples: Sequence[TrainingSample]) -> None:
    """Store samples in one compressed .npz file."""
    flat = [np.concatenate((s.prompt, s.answer)) for s in samples]
    small = all(int(f.max(initial=0)) < 1 << 16 for f in flat)
    np.savez_compressed(
        path,
        ids=np.concatenate(flat).astype(np.uint16 if small else np.int32),
        prompt_lens=np.asarray([len(s.prompt) for s in samples], dtype=np.int32),
        answer_lens=np.asarray([len(s.answer) for s in samples], dtype=np.int32),
    )


def load_samples(path: Path) -> list[TrainingSample]:
    """Read the samples from a file that `save_samples` has written."""
    with np.load(path) as stored:
        ids = stored["ids"].astype(np.int32)
        prompt_lens, answer_lens = stored["prompt_lens"], stored["answer_lens"]
    ends = np.cumsum(prompt_lens + answer_lens)
    return [
        TrainingSample(ids[e - a - p : e - a], ids[e - a : e])
        for p, a, e in zip(prompt_lens.tolist(), answer_lens.tolist(), ends.tolist(), strict=True)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBatch:
    """Packed samples, all int64 tensors."""

    ids_BS: Tensor
    """Token at each position."""
    next_ids_BS: Tensor
    """Next token of the same sample at each position."""
    positions_BS: Tensor
    """Position within the sample."""
    documents_BS: Tensor
    """Index of the sample at each position; -1 on padding."""
    selected_BQ: Tensor
    """Index in the row of each position whose next token belongs to an answer."""
    selected_documents_BQ: Tensor
    """Index of the sample at each selected position; -1 for unused entries."""

    def to(self, device: torch.device) -> TrainingBatch:
        """Return the same batch on a device."""
        pin = device.type == "cuda"
        return TrainingBatch(
            **{
                name: (t.pin_memory() if pin else t).to(device, non_blocking=pin)
                for name in TrainingBatch.__dataclass_fields__
                if (t := getattr(self, name)) is not None
            }
        )

    def attention_mask(self) -> Tensor:
        """Return the causal mask, bool [B, S, S]. A position attends to earlier positions of the
        same sample and to itself; padding attends to padding."""
        size = self.ids_BS.shape[1]
        same = self.documents_BS[:, :, None] == self.documents_BS[:, None, :]
        return same & torch.ones(size, size, dtype=torch.bool, device=same.device).tril()


@dataclass(frozen=True, slots=True, kw_only=True)
class PackShape:
    """Shape of every batch: number of rows, positions per row, and selected positions per row."""

    rows: int
    row_len: int
    selected_len: int


def choose_shape(
    samples: Sequence[TrainingSample], row_len: int, tokens_per_batch: int
) -> PackShape:
    """Return a batch shape with `selected_len` 10 % larger than the mean number of answer tokens
    per row, and at least as large as the longest answer."""
    share = sum(len(s.answer) for s in samples) / max(1, sum(len(s) for s in samples))
    selected = min(row_len, -(-int(row_len * share * 1.1 + 1) // 64) * 64)
    longest = max((len(s.answer) for s in samples), default=1)
    return PackShape(
        rows=max(1, tokens_per_batch // row_len),
        row_len=row_len,
        selected_len=max(selected, min(row_len, longest)),
    )


def pack_rows(
    samples: Sequence[TrainingSample], shape: PackShape, rng: np.random.Generator
) -> list[list[int]]:
    """Distribute shuffled samples over rows. Return the indices of the samples of each row.

    A sample goes into the first row with enough space among the last 32 rows that were begun, or
    begins a new one. Samples that are too long for a row are left out.
    """
    order = rng.permutation(len(samples))
    closed: list[list[int]] = []
    open_rows: list[tuple[list[int], int, int]] = []
    for index in order.tolist():
        size, answer = len(samples[index]), len(samples[index].answer)
        if size > shape.row_len or answer > shape.selected_len:
            continue
        for slot, (members, room, selectable) in enumerate(open_rows):
            if size <= room and answer <= selectable:
                members.append(index)
                open_rows[slot] = (members, room - size, selectable - answer)
                break
        else:
            if len(open_rows) == 32:
                closed.append(open_rows.pop(0)[0])
            open_rows.append(([index], shape.row_len - size, shape.selected_len - answer))
    rows = closed + [members for members, _, _ in open_rows]
    return [rows[i] for i in rng.permutation(len(rows)).tolist()]


def make_batch(
    samples: Sequence[TrainingSample], rows: Sequence[Sequence[int]], shape: PackShape
) -> TrainingBatch:
    """Build a batch from rows, each of which is a list of indices of samples. If there are fewer
    rows than shape.rows, the rest is padding."""
    full, part = (shape.rows, shape.row_len), (shape.rows, shape.selected_len)
    ids, next_ids, positions = (np.zeros(full, dtype=np.int64) for _ in range(3))
    documents = np.full(full, -1, dtype=np.int64)
    selected = np.zeros(part, dtype=np.int64)
    selected_documents = np.full(part, -1, dtype=np.int64)
    for row, members in enumerate(rows):
        at = chosen = 0
        for index in members:
            sample = samples[index]
            size, answer = len(sample), len(sample.answer)
            tokens = np.concatenate((sample.prompt, sample.answer))
            ids[row, at : at + size] = tokens
            next_ids[row, at : at + size - 1] = tokens[1:]
            positions[row, at : at + size] = np.arange(size)
            documents[row, at : at + size] = index
            first = at + len(sample.prompt) - 1
            selected[row, chosen : chosen + answer] = np.arange(first, first + answer)
            selected_documents[row, chosen : chosen + answer] = index
            at, chosen = at + size, chosen + answer
    arrays = (ids, next_ids, positions, documents, selected, selected_documents)
    names = TrainingBatch.__dataclass_fields__
    return TrainingBatch(**{n: torch.from_numpy(a) for n, a in zip(names, arrays, strict=True)})


def epoch_batches(
    samples: Sequence[TrainingSample], shape: PackShape, seed: int
) -> Iterator[TrainingBatch]:
    """Yield the batches of one pass over the samples, in a random order that `seed` determines. An
    incomplete last batch is dropped unless it is the only one."""
    rows = pack_rows(samples, shape, np.random.default_rng(seed))
    count = max(1, len(rows) // shape.rows)
    for i in range(count):
        yield make_batch(samples, rows[i * shape.rows : (i + 1) * shape.rows], shape)
