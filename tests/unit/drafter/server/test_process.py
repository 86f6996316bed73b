"""The drafter as a process: configuration, command line, loading, life and death."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest
from outrider_drafter.__main__ import main, parse_args
from outrider_drafter.config import DrafterConfig, ReconnectConfig
from outrider_drafter.hooks import VerifierAccess
from outrider_drafter.server.build import build_service

from outrider.errors import (
    FailedPreconditionError,
    InvalidRequestError,
    NotFoundError,
)
from outrider.spec.plan import DraftMethod
from outrider.transport.grpc import GrpcDialer, GrpcServer, verifier_services
from outrider.transport.in_process import InprocNetwork
from outrider.wire.messages import SessionEnd
from tests.factories import make_eagle3_head, make_target, make_tokenizer
from tests.fakes.scripted_verifier import ScriptedVerifier
from tests.unit.drafter.helpers import CHAIN, Script


def test_flags_override_the_file(tmp_path: Path) -> None:
    file = tmp_path / "drafter.toml"
    file.write_text(
        'model = "m"\nmethods = ["ngram"]\nthreads = 3\n[ngram]\nmax_match = 7\n'
        "[reconnect]\nmax_backoff_s = 9\n"
    )
    config = parse_args(["--config", str(file), "--threads", "1", "--drafter-id", "d"])
    assert config.threads == 1
    assert config.drafter_id == "d"
    assert config.ngram.max_match == 7
    assert config.reconnect == ReconnectConfig(max_backoff_s=9.0)


def test_methods_are_a_list_separated_by_commas() -> None:
    config = parse_args(["--model", "m", "--methods", "ngram,model", "--draft-model", "x"])
    assert config.methods == (DraftMethod.NGRAM, DraftMethod.MODEL)


def test_hooks_may_be_given_one_by_one() -> None:
    assert parse_args(["--model", "m", "--methods", "ngram"]).hooks == ()
    flags = ["--model", "m", "--methods", "ngram", "--hook", "mine.slow:factor=3,why=test"]
    config = parse_args([*flags, "--hook", "mine.other"])
    assert config.hooks == ("mine.slow:factor=3,why=test", "mine.other")


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        (["--methods", "eagle3"], "head"),
        (["--methods", "model"], "draft_model"),
        (["--methods", "none"], "none"),
        (["--methods", "ngram,ngram"], "repeat"),
        (["--methods", ""], "at least one"),
        (["--methods", "telepathy"], "ngram"),
        (["--methods", "ngram", "--threads", "-1"], "threads"),
        (["--methods", "ngram", "--drain-timeout-s", "-1"], "drain_timeout_s"),
        (["--methods", "ngram", "--hook", "no-module"], "no name of a module"),
        (["--methods", "ngram", "--hook", "mine:3"], "no KEY=VALUE"),
    ],
)
def test_a_mistake_is_named(flags: list[str], hint: str) -> None:
    with pytest.raises(InvalidRequestError, match=hint):
        parse_args(flags)


def test_a_mistake_ends_the_process_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--methods", "eagle3"]) == 2
    assert json.loads(capsys.readouterr().err)["event"] == "failed"


def test_a_hook_that_is_not_there_ends_the_process_with_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--model", "m", "--methods", "ngram", "--hook", "no_such_module"]) == 2
    said = json.loads(capsys.readouterr().err)
    assert said["event"] == "failed" and "there is no module no_such_module" in said["reason"]


def build(config: DrafterConfig) -> None:
    build_service(config, VerifierAccess(InprocNetwork().dialer()))


def test_parts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    target = str(make_target(tmp_path / "target"))
    foreign = str(make_eagle3_head(tmp_path / "foreign", vocab_size=300))
    head = str(make_eagle3_head(tmp_path / "head"))
    other = make_target(tmp_path / "other", layers=2)
    make_tokenizer(other, vocab_size=300)
    ngram, eagle = (DraftMethod.NGRAM,), (DraftMethod.EAGLE3,)
    with pytest.raises(InvalidRequestError, match="model"):
        build(DrafterConfig(methods=ngram))
    with pytest.raises(NotFoundError):
        build(DrafterConfig(methods=ngram, model=str(tmp_path / "nothing")))
    with pytest.raises(FailedPreconditionError, match="300"):
        build(DrafterConfig(methods=eagle, model=target, head=foreign))
    with pytest.raises(InvalidRequestError, match="nowhere"):
        build(DrafterConfig(methods=eagle, model=target, head="nowhere"))
    with pytest.raises(FailedPreconditionError, match="eagle3"):
        build(DrafterConfig(methods=(DraftMethod.EAGLE,), model=target, head=head))
    with pytest.raises(FailedPreconditionError, match="tokenizer"):
        build(DrafterConfig(methods=(DraftMethod.MODEL,), model=target, draft_model=str(other)))


@contextmanager
def process(*flags: str) -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.Popen(
        [sys.executable, "-m", "outrider_drafter", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


@asynccontextmanager
async def listening(verifier: ScriptedVerifier) -> AsyncIterator[tuple[str, GrpcDialer]]:
    """The verifier's address, and what to call others with."""
    server, dialer = GrpcServer("127.0.0.1:0", verifier_services(verifier)), GrpcDialer()
    try:
        yield await server.start(), dialer
    finally:
        await dialer.close()
        await server.stop()


def page_of(address: str) -> bytes:
    page: bytes = urlopen(f"http://{address}").read()
    return page


async def test_a_process_drafts_over_grpc_until_it_is_told_to_stop(tmp_path: Path) -> None:
    target, head = make_target(tmp_path / "target"), make_eagle3_head(tmp_path / "head")
    verifier = ScriptedVerifier()
    flags = ["--model", str(target), "--head", str(head), "--methods", "eagle3,ngram"]
    flags += ["--listen", "127.0.0.1:0", "--metrics-port", "0", "--drafter-id", "d7"]
    flags += ["--threads", "1"]
    async with listening(verifier) as (address, dialer):
        with process(*flags) as child:
            await drafts_until_told_to_stop(child, verifier, address, dialer)


async def drafts_until_told_to_stop(
    child: subprocess.Popen[str], verifier: ScriptedVerifier, address: str, dialer: GrpcDialer
) -> None:
    assert child.stdout is not None and child.stderr is not None
    ready = json.loads(await asyncio.to_thread(child.stdout.readline))
    assert ready["event"] == "ready"
    control = await dialer.drafter(ready["address"])
    await control.attach(address)
    await verifier.connected()
    script = Script(seed=1)
    await verifier.say(script.start(plan=CHAIN), script.verdict(12))
    proposal = await verifier.proposal()
    assert proposal.prefix_digest == script.digest(12) and len(proposal.tree) == 4
    info = await control.info()
    assert info.drafter_id == "d7" and info.sessions == 1 and info.verifiers == (address,)
    async with asyncio.timeout(10.0):
        # A proposal is counted once it was sent.
        counted = b'outrider_drafter_proposals_total{method="eagle3"} 1.0'
        while counted not in await asyncio.to_thread(page_of, ready["metrics"]):
            await asyncio.sleep(0.01)
    # It drafts on until the session is somebody else's.
    child.send_signal(signal.SIGTERM)
    async with asyncio.timeout(10.0):
        while not (await control.info()).draining:
            await asyncio.sleep(0.01)
    await verifier.say(script.verdict(14))
    assert (await verifier.proposal()).prefix_digest == script.digest(14)
    await verifier.say(SessionEnd(handle=script.handle))
    assert await asyncio.to_thread(child.wait, 20) == 0
    logs = [json.loads(line) for line in child.stderr.read().splitlines()]
    assert {"verifier connected", "draining", "stopping"} <= {entry["event"] for entry in logs}
    assert not any("traceback" in entry for entry in logs)
