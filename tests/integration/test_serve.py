"""`outrider serve` with real processes over the tiny model."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from outrider.client import Client, cli, user

START_S = 120.0


@contextmanager
def serving(*flags: str) -> Iterator[str]:
    """The address of its router; the command must end well when it is asked to."""
    command = [sys.executable, "-m", "outrider.client.cli", "serve", *flags]
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        timer = threading.Timer(START_S, process.kill)
        timer.start()
        assert process.stderr is not None
        said = []
        address = ""
        for line in process.stderr:
            said.append(line)
            if found := re.match(r"\[outrider\] ready on (\S+)", line):
                address = found.group(1)
                break
        timer.cancel()
        try:
            assert address, "".join(said)
            # What nobody reads would fill the pipe.
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield address
        finally:
            process.send_signal(signal.SIGTERM)
            ended = process.wait(60)
        assert ended == 0


@pytest.mark.timeout(240)
def test_so_many_verifiers_and_drafters_serve_behind_one_router(
    tiny_target: Path, tiny_head: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ("--model", str(tiny_target), "--head", str(tiny_head))
    counts = ("--verifiers", "2", "--drafters", "2")
    with serving(*files, *counts, "--port", "0", "--threads", "1") as address:
        with Client(address, timeout_s=60.0) as client:
            answer = client.generate([user("Name a colour.")], max_tokens=8, ignore_eos=True)
        assert len(answer.token_ids) == 8
        assert cli.main(["status", "--router", address]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = sorted(line.split()[1] for line in lines[1:])
    assert names == ["drafter-0", "drafter-1", "verifier-0", "verifier-1"]
    assert not any("NOT HEALTHY" in line for line in lines)
