"""Installing a browser for tests ends in time, and says why there is none."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tools import fetch_browser


@pytest.fixture
def apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file for the script that runs in place of apt-get, as root, where there is no browser."""
    (tmp_path / "touch").symlink_to(shutil.which("touch") or "")
    (tmp_path / "sleep").symlink_to(shutil.which("sleep") or "")
    (tmp_path / "chmod").symlink_to(shutil.which("chmod") or "")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return tmp_path / "apt-get"


def write(script: Path, *lines: str) -> None:
    script.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    script.chmod(0o755)


def test_a_browser_is_installed_after_the_lists_of_packages_were_read_anew(apt: Path) -> None:
    write(
        apt,
        f"cd {apt.parent}",
        'case "$*" in',
        "*update*) touch updated ;;",
        "*--download-only*) [ -e updated ] || exit 100 ;;",
        "*--no-download*) touch chromium; chmod +x chromium ;;",
        "esac",
    )
    assert fetch_browser.main() == 0
    assert fetch_browser.find_browser() == str(apt.parent / "chromium")


def test_a_mirror_that_does_not_answer_is_given_up(
    apt: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(apt, "exec sleep 60")
    monkeypatch.setattr(fetch_browser, "DOWNLOAD_S", 0.2)
    assert fetch_browser.main() == 1
    assert "took too long" in capsys.readouterr().err


def test_a_package_that_there_is_not_is_named(
    apt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(apt, 'echo "E: no such package" >&2', "exit 100")
    assert fetch_browser.main() == 1
    assert "no such package" in capsys.readouterr().err


def test_others_than_root_are_told_what_to_install(
    apt: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(apt, "exit 0")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert fetch_browser.main() == 1
    assert "only root" in capsys.readouterr().err


def test_a_system_without_apt_says_so(apt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fetch_browser.main() == 1
    assert "no apt-get" in capsys.readouterr().err
