"""A hub of models over HTTP on this machine: as much of its API as a download of files needs."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Files = Mapping[str, bytes]
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_INFO = re.compile(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/?]+))?")


class FakeHub:
    """Repositories by id, each with the files of its revisions; `main` is what is asked for by
    default."""

    def __init__(self, repositories: Mapping[str, Mapping[str, Files]], token: str = "") -> None:
        """`token`: what callers must show, "" is open to all."""
        self.repositories = repositories
        self.token = token
        self.asked: list[str] = []
        """Paths that were asked for."""
        self.breaks_after: int | None = None
        """Bytes of the next file after which its connection breaks once."""

    @contextmanager
    def serve(self) -> Iterator[str]:
        """Serve; the URL for HF_ENDPOINT."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:
                """Nothing."""

            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def do_GET(self) -> None:
                hub.answer(self, body=True)

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def answer(self, to: BaseHTTPRequestHandler, *, body: bool) -> None:
        """One request."""
        path = urllib.parse.unquote(to.path.partition("?")[0])
        self.asked.append(f"{to.command} {path}")
        if self.token and to.headers.get("authorization") != f"Bearer {self.token}":
            _say(to, 401, {"x-error-code": "GatedRepo", "x-error-message": "no access"}, b"")
        elif found := _FILE.fullmatch(path):
            self._file(to, *found.groups(), body=body)
        elif found := _INFO.fullmatch(path):
            self._info(to, found.group(1), found.group(2), found.group(3) or "main")
        else:
            _say(to, 404, {}, b"")

    def _revision(self, to: BaseHTTPRequestHandler, repo: str, revision: str) -> Files | None:
        revisions = self.repositories.get(repo)
        if revisions is None:
            _say(to, 404, {"x-error-code": "RepoNotFound"}, b"")
            return None
        named = {commit_of(repo, name): files for name, files in revisions.items()}
        files = named.get(revision, revisions.get(revision))
        if files is None:
            _say(to, 404, {"x-error-code": "RevisionNotFound"}, b"")
        return files

    def _info(self, to: BaseHTTPRequestHandler, repo: str, kind: str | None, revision: str) -> None:
        files = self._revision(to, repo, revision)
        if files is None:
            return
        if kind == "tree":
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": _etag(data)}
                for name, data in files.items()
            ]
            _say(to, 200, {}, json.dumps(entries).encode())
            return
        sha = revision if len(revision) == 40 else commit_of(repo, revision)
        siblings = [{"rfilename": name} for name in files]
        about = {"id": repo, "modelId": repo, "sha": sha, "siblings": siblings, "tags": []}
        _say(to, 200, {}, json.dumps(about).encode())

    def _file(
        self, to: BaseHTTPRequestHandler, repo: str, revision: str, name: str, *, body: bool
    ) -> None:
        files = self._revision(to, repo, revision)
        if files is None:
            return
        data = files.get(name)
        if data is None:
            _say(to, 404, {"x-error-code": "EntryNotFound"}, b"")
            return
        sha = revision if len(revision) == 40 else commit_of(repo, revision)
        headers = {"etag": f'"{_etag(data)}"', "x-repo-commit": sha, "accept-ranges": "bytes"}
        start = 0
        if asked := re.match(r"bytes=(\d+)-", to.headers.get("range", "")):
            start = int(asked.group(1))
            headers["content-range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        rest = data[start:]
        if body and self.breaks_after is not None and len(rest) > self.breaks_after:
            broken, self.breaks_after = rest[: self.breaks_after], None
            to.close_connection = True
            _say(to, 206 if start else 200, {**headers, "content-length": str(len(rest))}, broken)
            return
        _say(to, 206 if start else 200, headers, rest, body=body)


def commit_of(repo: str, revision: str) -> str:
    """The commit that a branch or tag of a repository is at."""
    return hashlib.sha1(f"{repo}@{revision}".encode()).hexdigest()


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def _say(
    to: BaseHTTPRequestHandler,
    status: int,
    headers: Mapping[str, str],
    data: bytes,
    *,
    body: bool = True,
) -> None:
    to.send_response(status)
    for name, value in ({"content-length": str(len(data))} | dict(headers)).items():
        to.send_header(name, value)
    to.end_headers()
    if body and to.command != "HEAD":
        to.wfile.write(data)
