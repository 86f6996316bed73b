"""`outrider train-head` from prompts to a checked head, on a tiny random target."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider.engine.training.cli import add_arguments, main
from tests.factories import make_target


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return main(parser.parse_args(arguments))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any]]:
    """Target and head directories, and the report."""
    root = tmp_path_factory.mktemp("cli")
    target, out = make_target(root / "target", layers=2), root / "head"
    for name, count in (("train", 12), ("held", 3)):
        rows = [json.dumps({"prompt": f"{name} {i}", "samples": 2}) for i in range(count)]
        (root / f"{name}.jsonl").write_text("\n".join(rows))
    arguments = (
        f"--target {target} --prompts {root}/train.jsonl --eval-prompts {root}/held.jsonl "
        f"--out {out} --tap-layers 0 0 1 --draft-vocab-size 300 --slots 8 --max-new-tokens 16 "
        "--temperature 1.5 --self-prompts 4 --tokens-per-batch 256 --row-len 128 --steps 30 "
        "--learning-rates 1e-3 5e-3 --trial-steps 4 --warmup-steps 5 --log-every 5 --unroll 2 5 "
        "--whole-steps 3 --deep-share 0.5 --step-decay 0.9"
    )
    assert run(*arguments.split()) == 0
    return target, out, json.loads((out / "report.json").read_text())


def test_the_loss_falls_and_the_report_holds_accuracy_by_step(
    trained: tuple[Path, Path, dict[str, Any]],
) -> None:
    report = trained[2]
    assert set(report["trials"]) == {"0.001", "0.005"}
    assert report["run"]["steps"] == 30
    assert report["config"]["step_decay"] == 0.9
    log = report["run"]["log"]
    assert log[-1]["loss"] < log[0]["loss"]
    held = report["held_out"]["all"]
    assert held["answers"] == 3
    assert len(held["loops_included"]["accuracy"]) == 16
    assert set(held["loops_included"]["look_ahead_tokens_per_round"]) == set("23456")
    assert len(log[0]["accuracy"]) == 2
    assert len(log[-1]["accuracy"]) == 5
    assert held["loops_included"]["tokens_per_round"]["4"] >= 1.0
    assert 0 < report["vocabulary"]["coverage"] <= 1


def test_the_trained_head_passes_the_check(
    trained: tuple[Path, Path, dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    target, out, _ = trained
    arguments = ("--target", str(target), "--head", str(out), "--check", "--prompt", "hello there")
    assert run(*arguments) == 0
    assert "all tensors are equal" in caplog.text


def test_a_finished_head_can_be_evaluated(
    trained: tuple[Path, Path, dict[str, Any]], tmp_path: Path
) -> None:
    target, out, _ = trained
    prompts = tmp_path / "task.jsonl"
    prompts.write_text('{"turns": ["one"]}\n{"turns": ["two"]}\n')
    arguments = (
        f"--target {target} --head {out} --evaluate --eval-prompts {prompts} --out {tmp_path} "
        "--max-new-tokens 16 --row-len 128 --eval-limit 1 --slots 2"
    )
    assert run(*arguments.split()) == 0
    figures = json.loads((tmp_path / "evaluation.json").read_text())
    assert figures["held_out"]["task"]["answers"] == 1


def test_a_run_may_start_from_a_head(
    trained: tuple[Path, Path, dict[str, Any]], tmp_path: Path
) -> None:
    target, head, before = trained
    arguments = (
        f"--target {target} --head {head} --answers {head}/answers.npz --out {tmp_path} "
        "--steps 3 --tokens-per-batch 256 --row-len 128 --warmup-steps 1 --log-every 1"
    )
    assert run(*arguments.split()) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["config"]["learning_rate"] == 3e-4
    assert report["vocabulary"] == before["vocabulary"]
    # It goes on from where the other run ended, and leaves a head of the same shape.
    assert report["run"]["log"][0]["loss"] < before["run"]["log"][0]["loss"]
    assert len(report["run"]["log"][-1]["accuracy"]) == 13
    old, new = (load_file(directory / "model.safetensors") for directory in (head, tmp_path))
    assert {name: (t.shape, t.dtype) for name, t in old.items()} == {
        name: (t.shape, t.dtype) for name, t in new.items()
    }
    assert torch.equal(old["d2t"], new["d2t"])
    assert not torch.equal(old["fc.weight"], new["fc.weight"])


def test_stored_answers_are_used_again(
    trained: tuple[Path, Path, dict[str, Any]], tmp_path: Path
) -> None:
    target, out, report = trained
    arguments = f"--target {target} --answers {out}/answers.npz --out {tmp_path} --answers-only"
    assert run(*arguments.split()) == 0
    again = json.loads((tmp_path / "report.json").read_text())
    assert again["samples"]["answers"] == report["samples"]["answers"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--out x", "training needs --out, and --prompts"),
        ("--check", "--check needs --head and --prompt"),
        ("--evaluate", "--evaluate needs --head, --eval-prompts and --out"),
        ("--check --head nowhere --prompt hi", "nowhere"),
        ("--out x --self-prompts 1 --head x --draft-vocab-size 9", "for new heads, not for --head"),
        ("--out {out} --self-prompts 1 --unroll 3 40", "within 1..16, not from 3 to 40"),
    ],
)
def test_bad_input_is_named(
    trained: tuple[Path, Path, dict[str, Any]],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    arguments: str,
    message: str,
) -> None:
    assert run("--target", str(trained[0]), *arguments.format(out=tmp_path).split()) == 2
    assert message in caplog.text
