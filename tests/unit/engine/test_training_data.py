"""Samples, packing and the draft vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from outrider.engine.training.data import (
    ChatTokenizer,
    PackShape,
    TrainingSample,
    choose_shape,
    drop_looping_samples,
    epoch_batches,
    load_samples,
    make_batch,
    pack_rows,
    read_prompts,
    repeated_share,
    save_samples,
)
from outrider.engine.training.vocab import build_vocabulary
from tests.factories import make_tokenizer


def sample(prompt: int, answer: int, first: int = 0) -> TrainingSample:
    """Consecutive token ids, so that every position is recognisable."""
    ids = np.arange(first, first + prompt + answer, dtype=np.int32)
    return TrainingSample(ids[:prompt], ids[prompt:])


def random_samples(count: int) -> list[TrainingSample]:
    rng = np.random.default_rng(0)
    return [
        sample(int(rng.integers(1, 20)), int(rng.integers(2, 30)), 100 * i) for i in range(count)
    ]


def test_prompts_are_read_once_with_their_sample_counts(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "a", "samples": 3}, {"prompt": "a"}, {"turns": ["b", "c"]}]
    file.write_text("\n".join(json.dumps(r) for r in rows))
    prompts = read_prompts([file], default_samples=2)
    assert [(p.text, p.samples) for p in prompts] == [("a", 3), ("b", 2)]


def test_a_prompt_may_hold_what_other_readers_take_for_the_end_of_a_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "a\u2028b\x85c"}, {"prompt": "d"}]
    file.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), "utf-8")
    assert [p.text for p in read_prompts([file])] == ["a\u2028b\x85c", "d"]


def test_prompts_end_with_the_answers_header(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    tokenizer = ChatTokenizer(tmp_path)
    ids = tokenizer.encode_turns(["hi"])[0]
    text = tokenizer.tokenizer.decode(ids.tolist(), skip_special_tokens=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokenizer.user_prefix().tolist()) == "user\n"


def test_loops_are_dropped() -> None:
    fine = sample(3, 40)
    loop = TrainingSample(fine.prompt, np.tile(np.arange(5, dtype=np.int32), 10))
    assert repeated_share(fine.answer) == 0.0
    assert repeated_share(loop.answer) > 0.5
    assert drop_looping_samples([fine, loop, sample(3, 1)]) == [fine]


def test_samples_survive_storage(tmp_path: Path) -> None:
    stored = [sample(2, 3), sample(1, 4, 70_000)]
    save_samples(tmp_path / "answers.npz", stored)
    for before, after in zip(stored, load_samples(tmp_path / "answers.npz"), strict=True):
        assert before.prompt.tolist() == after.prompt.tolist()
        assert before.answer.tolist() == after.answer.tolist()


def test_packing_places_every_fitting_sample_once() -> None:
    samples = [*random_samples(60), sample(60, 10)]
    shape = PackShape(rows=4, row_len=64, selected_len=48)
    rows = pack_rows(samples, shape, np.random.default_rng(0))
    assert sorted(i for row in rows for i in row) == list(range(60))
    for row in rows:
        assert sum(len(samples[i]) for i in row) <= shape.row_len
        assert sum(len(samples[i].answer) for i in row) <= shape.selected_len


def test_a_batch_keeps_documents_apart_and_selects_answers() -> None:
    samples = [sample(3, 2), sample(2, 4, 50)]
    batch = make_batch(samples, [[0, 1]], PackShape(rows=1, row_len=12, selected_len=8))
    assert batch.ids_BS[0].tolist() == [0, 1, 2, 3, 4, 50, 51, 52, 53, 54, 55, 0]
    assert batch.positions_BS[0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 0]
    assert batch.selected_documents_BQ[0].tolist() == [0, 0, 1, 1, 1, 1, -1, -1]
    chosen = batch.next_ids_BS[0][batch.selected_BQ[0][:6]]
    assert chosen.tolist() == [3, 4, 52, 53, 54, 55]
    mask = batch.attention_mask()[0]
    assert mask[6].nonzero().flatten().tolist() == [5, 6]
    assert mask.any(-1).all()


def test_epochs_differ_and_repeat_by_seed() -> None:
    samples = random_samples(40)
    shape = choose_shape(samples, 64, 256)
    assert (shape.rows, shape.row_len) == (4, 64)
    first = [b.ids_BS.tolist() for b in epoch_batches(samples, shape, 1)]
    assert first == [b.ids_BS.tolist() for b in epoch_batches(samples, shape, 1)]
    assert first != [b.ids_BS.tolist() for b in epoch_batches(samples, shape, 2)]


def test_the_vocabulary_takes_the_most_frequent_ids() -> None:
    answers = [np.asarray([5, 5, 5, 9, 9, 1], dtype=np.int32)]
    vocabulary = build_vocabulary(answers, 12, 3, always=[2])
    assert vocabulary.target_ids.tolist() == [2, 5, 9]
    assert vocabulary.coverage == pytest.approx(5 / 6)
    assert build_vocabulary(answers, 12, 12).coverage == 1.0
