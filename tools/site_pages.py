"""MkDocs hooks: add pages from outside docs/ to the site and rewrite the links to them.

mkdocs calls the functions named `on_...` (mkdocs.yml, `hooks`). A link to a file of the repository
that is not a page of the site becomes the file's path as text; a broken link stays unchanged, so
that a strict build fails.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "router/README.md": "processes/router.md",
    "verifier/README.md": "processes/verifier.md",
    "drafter/README.md": "processes/drafter.md",
    "proto/README.md": "processes/wire.md",
    "benchmarks/results/README.md": "results/index.md",
    "benchmarks/results/chaos.md": "results/chaos.md",
    "benchmarks/results/design-choices.md": "results/design-choices.md",
    "benchmarks/results/gpu/README.md": "results/gpu/index.md",
    "heads/smollm2-135m-eagle3/README.md": "processes/head.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
"""Files of the repository that are pages, and where."""
_SOURCES = {uri: path for path, uri in PAGES.items()}
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/."""
    for path, uri in PAGES.items():
        files.append(File.generated(config, uri, content=(ROOT / path).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead the links of a page to where their targets are on the site."""
    uri = page.file.src_uri
    path = _SOURCES.get(uri, f"docs/{uri}")
    return _LINK.sub(lambda link: _led(link[1], link[2], path, uri), markdown)


def _led(text: str, target: str, path: str, uri: str) -> str:
    """A link of the page `uri`, which is the file `path`."""
    link = f"[{text}]({target})"
    place, hash_, anchor = target.partition("#")
    if not place or "://" in place or place.startswith("mailto:"):
        return link
    meant = posixpath.normpath(posixpath.join(posixpath.dirname(path), place))
    if (ROOT / meant / "README.md").is_file():
        meant = f"{meant}/README.md"
    if meant in PAGES or meant.startswith("docs/"):
        leads = PAGES.get(meant, meant.removeprefix("docs/"))
        return f"[{text}]({posixpath.relpath(leads, posixpath.dirname(uri) or '.')}{hash_}{anchor})"
    return f"{text} (`{meant}`)" if (ROOT / meant).exists() else link
