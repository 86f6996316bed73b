"""Models by hub id, from a hub on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.client.local.model_files import find_model
from outrider.errors import InvalidRequestError, NotFoundError
from outrider.models import is_from_hub, resolve_model
from tests.fakes.hub import FakeHub

MODEL = {
    "config.json": b'{"v": 0}',
    "model.safetensors": bytes(300_000),
    "tokenizer.json": b"{}",
    "consolidated.safetensors": b"the same again",
    "original/model.safetensors": b"the same again",
    "README.md": b"about it",
}
# The library reads its variables when it is imported: each test asks a process of its own.
ASK = """
import json, sys
from outrider.errors import OutriderError
from outrider.models import resolve_model
try:
    found = resolve_model(sys.argv[1], revision=sys.argv[2] or None)
    names = sorted(str(f.relative_to(found)) for f in found.rglob("*") if f.is_file())
    print(json.dumps([str(found), *names]))
except OutriderError as error:
    print(json.dumps([error.code, error.reason, error.message]))
"""


@pytest.fixture(scope="module")
def hub() -> FakeHub:
    tagged = {**MODEL, "config.json": b'{"v": 1}'}
    return FakeHub(
        {
            "me/tiny": {"main": MODEL, "v1": tagged},
            "me/pickled": {"main": {"config.json": b"{}", "pytorch_model.bin": b"1"}},
        }
    )


@pytest.fixture(scope="module")
def url(hub: FakeHub) -> Iterator[str]:
    with hub.serve() as address:
        yield address


def ask(
    url: str, home: Path, name: str, revision: str = "", code: str = ASK, **environment: str
) -> list[str]:
    """What `resolve_model`, or other `code`, gives or raises."""
    known = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    known |= {"HF_ENDPOINT": url, "HF_HOME": str(home), **environment}
    done = subprocess.run(
        [sys.executable, "-c", code, name, revision],
        env=known,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    found: list[str] = json.loads(done.stdout)
    return found


def test_a_hub_id_is_downloaded_at_a_revision_and_kept(
    hub: FakeHub, url: str, tmp_path: Path
) -> None:
    hub.breaks_after = 100_000
    path, *names = ask(url, tmp_path, "me/tiny", "v1")
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (Path(path) / "config.json").read_bytes() == b'{"v": 1}'
    # A download that breaks off is resumed.
    assert (Path(path) / "model.safetensors").stat().st_size == 300_000
    again, *_ = ask("http://127.0.0.1:9", tmp_path, "me/tiny", "v1", HF_HUB_OFFLINE="1")
    assert again == path
    main, *_ = ask(url, tmp_path, "me/tiny")
    assert (Path(main) / "config.json").read_bytes() == b'{"v": 0}'


@pytest.mark.parametrize(
    ("name", "revision", "says"),
    [
        ("me/none", "", "the hub has no such id"),
        ("me/tiny", "v9", "no revision 'v9' of it"),
        ("me/pickled", "", "has no *.safetensors"),
    ],
)
def test_what_the_hub_has_not_is_said(
    url: str, tmp_path: Path, name: str, revision: str, says: str
) -> None:
    code, reason, message = ask(url, tmp_path, name, revision)
    assert [code, reason] == ["NOT_FOUND", "NO_HUB"]
    assert says in message and name in message and "\n" not in message


ASK_TOKENIZER = ASK.replace("resolve_model", "resolve_tokenizer").replace(
    ", revision=sys.argv[2] or None", ""
)


def test_a_tokenizer_is_downloaded_without_weights(hub: FakeHub, url: str, tmp_path: Path) -> None:
    hub.asked.clear()
    path, *names = ask(url, tmp_path, "me/tiny", code=ASK_TOKENIZER)
    assert names == ["config.json", "tokenizer.json"]
    assert not any("safetensors" in asked for asked in hub.asked)
    offline = {"code": ASK_TOKENIZER, "HF_HUB_OFFLINE": "1"}
    assert ask(url, tmp_path, "me/tiny", **offline) == [path, *names]
    # It is no model: a process that needs the weights finds none.
    code, *_ = ask(url, tmp_path, "me/tiny", HF_HUB_OFFLINE="1")
    assert code in ("NOT_FOUND", "UNAVAILABLE")
    code, reason, message = ask(url, tmp_path, "me/pickled", code=ASK_TOKENIZER)
    assert [code, reason] == ["NOT_FOUND", "NO_HUB"] and "no tokenizer.json" in message


def test_processes_that_serve_read_a_pulled_model_offline_and_cannot_write(
    hub: FakeHub, url: str, tmp_path: Path
) -> None:
    """A pod whose init container had the token and whose processes have neither that nor a
    writable volume."""
    hub.token = "secret"
    try:
        path, *names = ask(url, tmp_path, "me/tiny", HF_TOKEN="secret")
    finally:
        hub.token = ""
    folders = [tmp_path, *(f for f in tmp_path.rglob("*") if f.is_dir() and not f.is_symlink())]
    for folder in folders:
        folder.chmod(0o555)
    try:
        for code in (ASK, ASK_TOKENIZER):
            found = ask("http://127.0.0.1:9", tmp_path, "me/tiny", code=code, HF_HUB_OFFLINE="1")
            assert found == [path, *names]
    finally:
        for folder in folders:
            folder.chmod(0o755)


def test_a_gated_model_needs_a_token(hub: FakeHub, url: str, tmp_path: Path) -> None:
    hub.token = "secret"
    try:
        _, reason, message = ask(url, tmp_path, "me/tiny")
        assert (reason, "HF_TOKEN" in message) == ("NO_HUB", True)
        path, *_ = ask(url, tmp_path, "me/tiny", HF_TOKEN="secret")
        assert Path(path).is_dir()
    finally:
        hub.token = ""


def test_a_hub_that_is_not_reached_is_unavailable(tmp_path: Path) -> None:
    code, reason, message = ask("http://127.0.0.1:9", tmp_path, "me/tiny")
    assert (code, reason) == ("UNAVAILABLE", "DOWNLOAD_FAILED")
    assert message.startswith("me/tiny is no directory here, and the hub cannot be reached")


def test_a_revision_is_for_hub_ids_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name in (str(tmp_path), "smollm2-135m"):
        with pytest.raises(InvalidRequestError, match="a revision (needs a hub id|is for hub ids)"):
            resolve_model(name, revision="main")
    with pytest.raises(InvalidRequestError, match="a revision (needs a hub id|is for hub ids)"):
        find_model(str(tmp_path), head=tmp_path, head_revision="main")
    with pytest.raises(NotFoundError, match="no draft head at"):
        find_model(str(tmp_path), head=tmp_path / "none")


def test_what_lies_on_this_machine_is_no_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_from_hub("owner/name")
    (tmp_path / "owner" / "name").mkdir(parents=True)
    for name in ("owner/name", "./owner/other", "/owner/name", "~/name", "a/b/c", "plain", ".a/b"):
        assert not is_from_hub(name)
