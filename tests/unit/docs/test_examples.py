"""What the pages show works: commands parse, links lead somewhere, configurations load."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import tomllib
from pathlib import Path

import pytest
from outrider_bench.__main__ import BENCHMARKS
from outrider_ray.commands import make_command_parser as ray_parser
from outrider_router.api.http.request_models import ChatCompletionRequest, CompletionRequest

from outrider.client.commands.main import make_parser
from outrider.config import load_config
from outrider.config.__main__ import make_parser as config_parser
from outrider.config.process_registry import PROCESSES
from tests.unit.docs.pages import (
    ROOT,
    Excerpt,
    blocks,
    code_lines,
    commands,
    links,
    pages,
    words_of,
)

COMMANDS = commands()
TOML = [Excerpt(page, text) for page in pages() for text in blocks(page, "toml")]
FIRST_PAGES = ("README.md", "docs/gpu-quick-start.md", "docs/deploy-local.md")
"""What a newcomer reads first; each shows how to install and how to serve."""
_MAKE = re.compile(r"make ([a-z][a-z-]*)")
_EXTRAS = re.compile(r"(?:outrider|\.)\[([a-z,]+)\]")
_CURL = re.compile(r"curl \S+/v1/(chat/completions|completions) .*-d '(\{.*\})'")
NEEDED = {"router": {"model": "m", "verifiers": ("v:1",)}, "ray": {"model": "m"}}


def parser_of(words: list[str]) -> tuple[argparse.ArgumentParser, list[str]]:
    """The real parser of a command line, and what it gets."""
    program, *rest = words
    if program == "outrider_ray" and rest[:1] == ["node"]:
        anything = argparse.ArgumentParser(add_help=False)
        anything.add_argument("flags", nargs="*", help="those of `ray start`")
        return anything, ["--", *rest]
    if program == "outrider_ray" and rest[:1] in (["status"], ["stop"]):
        return ray_parser(rest[0]), rest[1:]
    if program == "outrider_ray":
        return PROCESSES["ray"].parser, rest
    if program != "outrider":
        return PROCESSES[program.removeprefix("outrider-")].parser, rest
    match rest:
        case ["ray", *rest]:
            return parser_of(["outrider_ray", *rest])
        case ["config", *rest]:
            return config_parser(), rest
        case ["train-head", *rest]:
            module, parser = "outrider.engine.training.cli", argparse.ArgumentParser()
        case ["bench", name, *rest]:
            module, parser = f"outrider_bench.{BENCHMARKS[name][0]}", argparse.ArgumentParser()
        case ["chaos", *rest]:
            return importlib.import_module("outrider_chaos.__main__").make_parser(), rest
        case _:
            return make_parser(), rest
    importlib.import_module(module).add_arguments(parser)
    return parser, rest


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as the site and code hosts make them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", title.lower()).strip() for title in titles)
    return {re.sub(r"[\s]+", "-", title) for title in plain}


def test_the_pages_have_commands_and_configurations() -> None:
    assert len(COMMANDS) > 40 and len(TOML) >= 4


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_command_is_one_that_the_program_takes(
    command: Excerpt, capsys: pytest.CaptureFixture[str]
) -> None:
    parser, arguments = parser_of(words_of(command.text))
    try:
        parser.parse_args(arguments)
    except SystemExit:
        pytest.fail(f"{command}\n{capsys.readouterr().err}")


@pytest.mark.parametrize("name", FIRST_PAGES)
def test_a_first_page_shows_how_to_serve(name: str) -> None:
    found = [words_of(each.text) for each in COMMANDS if each.page == ROOT / name]
    assert len(found) >= 5
    assert any(words[:2] == ["outrider", "serve"] for words in found)


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_make_target_is_one_of_the_makefile(page: Path) -> None:
    targets = re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    shown = {match[1] for line in code_lines(page) if (match := _MAKE.match(line))}
    assert shown <= set(targets)


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_an_extra_is_one_of_the_distribution(page: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    shown = {name for names in _EXTRAS.findall(page.read_text()) for name in names.split(",")}
    assert shown <= set(project["optional-dependencies"])


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_request_by_curl_is_one_that_the_api_takes(page: Path) -> None:
    for line in code_lines(page):
        if match := _CURL.match(line):
            body = json.loads(match[2])
            model = ChatCompletionRequest if match[1].startswith("chat") else CompletionRequest
            assert set(body) <= set(model.model_fields), line
            model.model_validate(body)


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_are_there(page: Path) -> None:
    for target in links(page):
        place, _, anchor = target.partition("#")
        leads = (page.parent / place).resolve() if place else page
        assert leads.exists(), target
        if anchor and leads.suffix == ".md":
            assert anchor in anchors(leads), target


@pytest.mark.parametrize("block", TOML, ids=lambda block: str(block).partition("\n")[0])
def test_a_configuration_is_one_that_its_process_takes(block: Excerpt, tmp_path: Path) -> None:
    """Its first line names the process: `# router.toml`. What every process needs may be left out,
    as if flags gave it."""
    name = re.match(r"# (\w+)\.toml\b", block.text)
    assert name is not None, "its first line must be a comment such as `# router.toml`"
    file = tmp_path / "shown.toml"
    file.write_text(block.text)
    given = {key for key in NEEDED.get(name[1], {}) if re.search(rf"^{key} *=", block.text, re.M)}
    flags = {key: value for key, value in NEEDED.get(name[1], {}).items() if key not in given}
    if name[1] == "drafter" and "head" not in block.text and "methods" not in block.text:
        flags["methods"] = ("ngram",)
    load_config(PROCESSES[name[1]].config, file, flags)


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_python_on_a_page_is_python(page: Path) -> None:
    for code in blocks(page, "python"):
        compile(code, str(page), "exec", flags=0x2000)  # await may stand at the top level
