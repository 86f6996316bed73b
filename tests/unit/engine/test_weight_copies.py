"""Weights that threads copy in the background: the same ones, and the same errors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.engine.model_loader import load_target
from outrider.engine.target import TargetModel
from outrider.engine.weight_copies import NUM_THREADS, WeightCopies
from outrider.errors import InvalidRequestError


def _tensors(target: TargetModel) -> list[torch.Tensor]:
    weights = target.weights
    found = [weights.embedding, weights.final_norm, weights.lm_head.weight]  # type: ignore[attr-defined]
    for layer in weights.layers:
        found += [layer.input_norm, layer.post_norm]
        found += [] if layer.qk_norms is None else [layer.qk_norms]
        for linear in (layer.qkv, layer.o_proj, layer.gate_up, layer.down):
            found.append(linear.weight)  # type: ignore[attr-defined]
            bias = linear.bias  # type: ignore[attr-defined]
            found += [] if bias is None else [bias]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_copies_in_the_background_give_the_same_weights(
    checkpoints: Callable[[str], Path], family: str, dtype: torch.dtype
) -> None:
    path = checkpoints(family)
    copies = WeightCopies()
    target = load_target(path, kv_tokens=16, dtype=dtype, packed=False, copies=copies)
    copies.wait()
    expected = load_target(path, kv_tokens=16, dtype=dtype, packed=False)
    for found, wanted in zip(_tensors(target), _tensors(expected), strict=True):
        assert found.dtype is dtype
        assert torch.equal(found, wanted)
    assert copies.seconds > 0.0


def test_the_pool_is_sized_before_anything_is_copied(
    checkpoints: Callable[[str], Path],
) -> None:
    copies = WeightCopies()

    def size(_: object) -> int:
        assert copies.seconds == 0.0
        return 16

    load_target(checkpoints("llama"), kv_tokens=size, packed=False, copies=copies)
    copies.wait()
    assert copies.seconds > 0.0


def test_a_tensor_of_another_shape_fails_the_load_with_its_error(
    checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    path = checkpoints("llama")
    for file in path.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = tensors[name][:, :-1].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    copies = WeightCopies()
    with pytest.raises(InvalidRequestError, match="must have shape"):
        load_target(tmp_path, kv_tokens=16, packed=False, copies=copies)
        copies.wait()


def test_check_raises_the_error_of_a_copy_and_gives_up_the_rest() -> None:
    copies, may_fail, ran = WeightCopies(), threading.Event(), list[int]()

    def fail() -> None:
        may_fail.wait(10)
        raise InvalidRequestError("a damaged tensor")

    for _ in range(NUM_THREADS):
        copies.add(fail)
    for number in range(1000):
        copies.add(lambda number=number: ran.append(number))
    copies.start()
    copies.check()
    may_fail.set()
    with pytest.raises(InvalidRequestError, match="a damaged tensor"):
        copies.wait()
    with pytest.raises(InvalidRequestError, match="a damaged tensor"):
        copies.check()


def test_weights_that_are_packed_cannot_be_copied_later(
    checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.engine.model_loader.can_pack", lambda dtype, device: True)
    with pytest.raises(ValueError, match="packed"):
        load_target(checkpoints("llama"), kv_tokens=16, packed=True, copies=WeightCopies())
