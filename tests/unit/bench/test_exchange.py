"""`outrider bench exchange`: every transport exchanges rounds, and one table has all of them."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest
import torch
from outrider_bench.exchange import cli
from outrider_bench.exchange.channel_rounds import run_transport
from outrider_bench.exchange.channels import TRANSPORTS
from outrider_bench.exchange.device_rounds import (
    find_devices,
    measure_killed_drafter,
)

from outrider.errors import InvalidRequestError, UnavailableError

WIDTH = 16


def parsed(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return parser.parse_args(flags)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without CUDA devices."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_round_trip_by_every_channel(transport: str) -> None:
    found = run_transport(transport, [(1, 0.0), (2, 0.1)], rounds=6, width=WIDTH)
    assert [len(times) for times in found] == [6, 6]
    assert all(time > 0.0 for times in found for time in times)


@pytest.mark.usefixtures("no_gpu")
def test_a_verifier_goes_on_when_its_drafter_is_killed() -> None:
    found = measure_killed_drafter("host", find_devices("host"), width=WIDTH)
    assert not found["is_open"]
    assert found["idle_us_again"] > 0.0


@pytest.mark.usefixtures("no_gpu")
def test_a_machine_without_a_gpu_has_no_buffers_in_memory_of_devices() -> None:
    with pytest.raises(UnavailableError, match="no CUDA device"):
        find_devices("device")


@pytest.mark.parametrize(
    ("has_access", "kind", "drafter"),
    [(True, "device", "cuda:1"), (False, "device", "cuda:0"), (False, "host", "cuda:1")],
)
def test_two_devices_are_used_where_one_has_access_to_what_the_other_maps(
    monkeypatch: pytest.MonkeyPatch, has_access: bool, kind: str, drafter: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: has_access)
    assert find_devices(kind) == ("cuda:0", drafter)
    assert find_devices(kind, same_device=True) == ("cuda:0", "cuda:0")


@pytest.mark.usefixtures("no_gpu")
def test_one_table_says_why_a_transport_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--sessions", "1,2", "--width", "16", "--rounds", "5", "--work-ms", "0,1", "--json"]
    cli.run(parsed(*flags, "--transports", "buffers.device,buffers.host,shm"))
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split(" | ")[0]: line for line in lines if line.startswith("| ")}
    assert "unavailable: no CUDA device" in rows["| buffers.device"]
    assert {"| buffers.host", "| shm"} <= set(rows)
    result: dict[str, Any] = json.loads(lines[-1])
    assert result["unavailable"] == {"buffers.device": "no CUDA device"}
    found = [(cell["transport"], cell["work_ms"], cell["sessions"]) for cell in result["cells"]]
    assert found == [
        (transport, work_ms, sessions)
        for transport in ("buffers.host", "shm")
        for work_ms in (0.0, 1.0)
        for sessions in (1, 2)
    ]
    assert all(0.0 < cell["p50_us"] <= cell["p99_us"] for cell in result["cells"])
    # What either side found was what the other one had put.
    by_buffers = [cell for cell in result["cells"] if "mismatches" in cell]
    assert [(cell["mismatches"], cell["is_open"]) for cell in by_buffers] == [(0, True)] * 4


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--sessions", "0"),
        ("--sessions", "a"),
        ("--rounds", "0"),
        ("--width", "0"),
        ("--width", "1000000"),
        ("--work-ms", "-1"),
        ("--transports", "pigeon"),
    ],
)
def test_flags_without_sense_are_refused(flag: str, value: str) -> None:
    with pytest.raises(InvalidRequestError, match=flag):
        cli.run(parsed(f"{flag}={value}"))
