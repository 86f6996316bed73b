"""What `outrider serve` finds out about its files before it starts a process."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.client.commands import main, serve
from outrider.client.local import cluster as local_cluster
from outrider.client.local.cluster import LocalCluster
from outrider.client.local.config import LocalFleetConfig
from outrider.client.local.preflight import check_files
from outrider.errors import FailedPreconditionError, InvalidRequestError, OutriderError
from outrider.spec.plan import DraftMethod
from tests.factories import make_tokenizer
from tests.unit.checkpoints.files import Tensors, edit_config, edit_tensors, quantize_fp8


@pytest.fixture
def files(tiny_target: Path, tiny_head: Path, tmp_path: Path) -> LocalFleetConfig:
    """A target, a head and a small draft model that can be served."""
    paths = {"model": tiny_target, "head": tiny_head, "draft": tiny_target}
    for name, source in paths.items():
        shutil.copytree(source, tmp_path / name)
    return LocalFleetConfig(
        model=tmp_path / "model",
        head=tmp_path / "head",
        draft_model=tmp_path / "draft",
        methods=(DraftMethod.EAGLE3, DraftMethod.MODEL, DraftMethod.NGRAM),
    )


def config(part: str, **changes: Any) -> Callable[[Path], None]:
    return lambda root: edit_config(root / part, changes)


def tensors(part: str, change: Callable[[Tensors], object]) -> Callable[[Path], None]:
    return lambda root: edit_tensors(root / part, change)


def text(name: str, content: str) -> Callable[[Path], None]:
    return lambda root: void((root / name).write_text(content))


def void(_: object) -> None:
    pass


def truncate(root: Path) -> None:
    file = root / "model/model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def add_tokens(root: Path) -> None:
    tokenizer = make_tokenizer(root / "model")
    tokenizer.add_tokens([f"token{index}" for index in range(200)])
    tokenizer.save(str(root / "model/tokenizer.json"))


PROBLEMS: list[tuple[Callable[[Path], object], str]] = [
    (config("model", model_type="gpt2"), r"model/config\.json: model_type must be one of"),
    (config("model", quantization_config={"quant_method": "awq"}), "quantization_config .awq."),
    (config("model", rope_scaling={"type": "yarn"}), "rope type must be one of"),
    (
        config("model", eos_token_id=5000),
        r"model/config\.json: eos_token_id must be of token ids in 0\.\.383 .*, not 5000",
    ),
    (
        text("model/generation_config.json", '{"eos_token_id": [2, -1]}'),
        r"model/generation_config\.json: eos_token_id must be .*, not -1",
    ),
    (config("draft", eos_token_id=384), r"draft/config\.json: eos_token_id must be .*, not 384"),
    (config("model", hidden_size=None), r"model/config\.json: hidden_size is missing"),
    (config("model", hidden_size="64"), "hidden_size must be a positive integer, not '64'"),
    (config("model", num_attention_heads=0), "num_attention_heads must be a positive integer"),
    (config("model", num_attention_heads=3), "num_attention_heads .3. must be a .* multiple of"),
    (config("model", layer_types=5), "layer_types must be a list, not 5"),
    (config("model", rms_norm_eps="x"), "rms_norm_eps must be a finite positive number, not 'x'"),
    (tensors("model", quantize_fp8), "unexpected tensor .*weight_scale_inv"),
    (tensors("model", lambda t: t.pop("model.layers.5.mlp.down_proj.weight")), "down_proj"),
    (config("model", intermediate_size=96), "must have shape"),
    (text("model/model.safetensors.index.json", "{}"), "not a safetensors index"),
    (truncate, "damaged safetensors file"),
    (lambda root: (root / "model/model.safetensors").unlink(), "holds neither"),
    (lambda root: (root / "model/tokenizer.json").unlink(), "no tokenizer.json in"),
    (text("model/tokenizer.json", "{}"), "is not a tokenizer"),
    (text("model/tokenizer_config.json", "{"), "tokenizer_config.json is not JSON"),
    (
        text("model/chat_template.jinja", "{% if %}"),
        r"model/chat_template\.jinja: the chat template does not compile",
    ),
    (
        text("model/tokenizer_config.json", '{"chat_template": "{% if %}"}'),
        r"model/tokenizer_config\.json: the chat template does not compile",
    ),
    (add_tokens, r"ids up to \d+, but the vocabulary of the model has 384 ids"),
    (config("head", vocab_size=500), "vocabulary of 500 ids, the target has 384"),
    (config("head", hidden_act="gelu"), r"head/config\.json: hidden_act must be"),
    (tensors("head", lambda t: t.update(scale=torch.ones(1))), "unexpected tensor .*scale"),
    (lambda root: (root / "head/model.safetensors").unlink(), "holds neither"),
    (config("draft", model_type="phi"), r"draft/config\.json: model_type must be one of"),
    (tensors("draft", quantize_fp8), "draft: unexpected tensor .*weight_scale_inv"),
    (lambda root: make_tokenizer(root / "draft", 300), "draft must have the tokenizer of"),
]


@pytest.mark.parametrize(("spoil", "match"), PROBLEMS, ids=[match for _, match in PROBLEMS])
def test_files_that_cannot_be_served_are_refused_by_the_reason(
    files: LocalFleetConfig, tmp_path: Path, spoil: Callable[[Path], object], match: str
) -> None:
    check_files(files)
    spoil(tmp_path)
    with pytest.raises(OutriderError, match=match) as caught:
        check_files(files)
    # One line, and misuse by its exit status.
    assert "\n" not in caught.value.message
    cluster = LocalCluster(files)
    with pytest.raises(type(caught.value), match=match):
        cluster.start()
    assert not cluster.processes


def test_a_length_beyond_the_models_context_is_refused_with_both_numbers(
    files: LocalFleetConfig,
) -> None:
    limit = json.loads((files.model / "config.json").read_text())["max_position_embeddings"]
    check_files(replace(files, max_model_len=limit))
    cluster = LocalCluster(replace(files, max_model_len=limit + 1))
    with pytest.raises(
        InvalidRequestError, match=rf"--max-model-len must be at most {limit}, .* got {limit + 1}"
    ):
        cluster.start()
    assert not cluster.processes


def test_a_head_of_another_kind_than_the_methods_is_refused(files: LocalFleetConfig) -> None:
    eagle = replace(files, methods=(DraftMethod.EAGLE,))
    with pytest.raises(FailedPreconditionError, match="holds an eagle3 head, not eagle"):
        check_files(eagle)


def test_files_of_methods_that_are_not_used_are_not_read(
    files: LocalFleetConfig, tmp_path: Path
) -> None:
    shutil.rmtree(tmp_path / "head")
    shutil.rmtree(tmp_path / "draft")
    check_files(replace(files, methods=(DraftMethod.NGRAM,)))


def test_rays_launcher_is_not_run_with_files_that_cannot_be_served(
    files: LocalFleetConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_config(files.model, {"model_type": "gpt2"})
    monkeypatch.setattr(serve, "run_module", lambda *_: pytest.fail("it was run"))
    assert main.main(["serve", "--runtime", "ray", "--model", str(files.model)]) == 2
    assert "model_type must be one of" in capsys.readouterr().err.splitlines()[-1]


def test_a_model_without_a_chat_template_is_warned_of_before_anything_starts(
    files: LocalFleetConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_files(files) == ()
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (files.model / name).unlink(missing_ok=True)
    line = f"{files.model} has no chat template: chat requests will be refused"
    assert check_files(files) == (line,)

    lines: list[str] = []

    def stop(line: str) -> None:
        lines.append(line)
        if line.startswith("starting"):
            raise InvalidRequestError("nothing is started")

    with pytest.raises(InvalidRequestError, match="nothing is started"):
        LocalCluster(files, progress=stop).start()
    assert lines.count(line) == 1
    monkeypatch.setattr(serve, "run_module", lambda *_: 0)
    assert main.main(["serve", "--runtime", "ray", "--model", str(files.model)]) == 0
    assert capsys.readouterr().err.count(line) == 1


def test_a_port_that_is_taken_is_said_first(
    files: LocalFleetConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(*_: object) -> None:
        raise InvalidRequestError("taken")

    monkeypatch.setattr(local_cluster, "check_ports_free", taken)
    edit_config(files.model, {"model_type": "gpt2"})
    with pytest.raises(InvalidRequestError, match="taken"):
        LocalCluster(files).start()


def test_the_check_needs_no_torch(files: LocalFleetConfig) -> None:
    paths = {"model": files.model, "head": files.head}
    code = (
        "import json, sys; from pathlib import Path\n"
        "sys.modules['torch'] = sys.modules['safetensors'] = None\n"
        "from outrider.client.local.config import LocalFleetConfig\n"
        "from outrider.client.local.preflight import check_files\n"
        "paths = json.loads(sys.argv[1])\n"
        "check_files(LocalFleetConfig(**{name: Path(path) for name, path in paths.items()}))\n"
    )
    argument = json.dumps({name: str(path) for name, path in paths.items()})
    done = subprocess.run([sys.executable, "-c", code, argument], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
