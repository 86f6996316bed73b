"""The site builds without a warning and without the network; its generated pages are fresh."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import outrider
from tests.unit.docs.pages import ROOT
from tools import decisions, licences

FOREIGN = re.compile(
    r"<(?:script|img|iframe)[^>]*\ssrc=\"?https?:|<link[^>]*stylesheet[^>]*https?:"
)


def without_versions(page: str) -> str:
    """The report without what another day or machine changes: versions, and what is brought
    along."""
    page = re.sub(r"^(\| [\w-]+ \|) ~?[\w.]+ \|", r"\1 |", page, flags=re.MULTILINE)
    return re.sub(r"^They bring along: .*$", "", page, flags=re.MULTILINE)


def test_every_licence_is_allowed_and_every_dependency_has_a_reason() -> None:
    assert licences.problems() == []


def test_the_report_of_licences_is_fresh() -> None:
    committed = (ROOT / "docs" / "licences.md").read_text()
    assert without_versions(committed) == without_versions(licences.page()), "run `make generated`"


@pytest.mark.parametrize(
    ("expression", "allowed"),
    [
        ("MIT", True),
        ("MIT AND Apache-2.0 WITH LLVM-exception", True),
        ("GPL-3.0-or-later", False),
        ("GPL-3.0-or-later OR MIT", True),
        ("MIT AND GPL-3.0-or-later", False),
        ("MIT OR BSD-3-Clause AND GPL-3.0-or-later", True),
        ("GPL-3.0-or-later OR MIT AND AGPL-3.0", False),
        ("(MIT OR GPL-3.0-or-later) AND ISC", False),
        ("unknown", False),
    ],
)
def test_an_expression_is_allowed_if_its_terms_can_be_met(expression: str, allowed: bool) -> None:
    assert licences.is_allowed(expression, licences.ALLOWED) == allowed


def test_the_list_of_decisions_is_fresh() -> None:
    committed = (ROOT / "docs" / "decisions" / "README.md").read_text()
    assert committed == decisions.page(), "run `make generated`"


@pytest.mark.parametrize("record", decisions.records(), ids=lambda record: record.path.name)
def test_a_decision_record_is_one_page_of_four_parts(record: decisions.Record) -> None:
    text = record.path.read_text()
    assert record.path.name.startswith(f"{record.number:04}-")
    assert len(text.splitlines()) <= 60
    if record.area is not None:
        parts = re.findall(r"^## (.+)$", text, re.MULTILINE)
        assert parts == ["Context", "Decision", "Consequences", "Alternatives"]


@pytest.mark.parametrize("record", decisions.records(), ids=lambda record: record.path.name)
def test_modules_that_a_decision_record_names_exist(record: decisions.Record) -> None:
    text = record.path.read_text()
    paths = re.findall(r"`([a-z_]+(?:/[a-z_]+)+\.py)`", text)
    for name in re.findall(r"`(outrider\w*(?:\.\w+)+)`", text):
        # The last part of a longer name may be a class or function.
        module = name.rpartition(".")[0] if name.count(".") > 1 else name
        paths.append(module.replace(".", "/") + "*")
    assert [
        path
        for path in paths
        if not any(ROOT.glob(f"*/{path}"))
        and not any(ROOT.glob(path))
        and not any(ROOT.glob(f"*/*/{path}"))
    ] == []


def test_decisions_that_the_code_cites_exist() -> None:
    in_force = {record.number for record in decisions.records() if record.area is not None}
    folders = ("outrider", "router", "verifier", "drafter", "tests", "tools", "deploy")
    cited = {
        (int(number), path.relative_to(ROOT))
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        for number in re.findall(r"\b[Dd]ecision (\d+)", path.read_text())
    }
    assert {place for place in cited if place[0] not in in_force} == set()


def test_the_changelog_has_one_line_a_change_under_versions() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    versions = [line.split()[1] for line in lines if line.startswith("## ")]
    assert outrider.__version__ in versions
    assert versions == sorted(versions, key=lambda version: [*map(int, version.split("."))])[::-1]
    first = next(index for index, line in enumerate(lines) if line.startswith("### "))
    assert not [line for line in lines if line.startswith("  ")], "a change has one line"
    assert {line for line in lines[first:] if line.startswith("### ")} <= {
        f"### {kind}" for kind in ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
    }


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; the build fails at any warning."""
    for module in ("mkdocs", "material", "mkdocstrings"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is missing: it comes with the `docs` extra")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_has_its_pages_and_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = {str(page.relative_to(site)) for page in site.rglob("*.html")}
    assert {"index.html", "api.html", "processes/router.html", "decisions/index.html"} <= pages
    for page in site.rglob("*.html"):
        assert not FOREIGN.search(page.read_text()), page
    for style in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()[\"' ]*https?:", style.read_text()), style


def test_the_api_reference_has_every_public_name(site: Path) -> None:
    import outrider.client

    page = (site / "api.html").read_text()
    missing = [
        name for name in outrider.client.__all__ if f'id="outrider.client.{name}"' not in page
    ]
    assert missing == []
