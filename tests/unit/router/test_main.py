"""The router as a process: configuration, the ready line, its logs, its end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from outrider_router.__main__ import main, parse_args

from outrider.client import Client, RetryPolicy, UnavailableError
from outrider.errors import InvalidRequestError, NotFoundError
from outrider.spec.plan import DraftMethod
from tests.fakes.tokenizer import make_tokenizer_dir


def test_a_file_is_read_and_flags_override_it(tmp_path: Path) -> None:
    file = tmp_path / "router.toml"
    file.write_text(
        'model = "m"\nverifiers = ["a:1", "b:2"]\nqueue_limit = 7\n'
        '[speculation]\nmethod = "ngram"\ndraft_tokens = 6\n'
    )
    config = parse_args(["--config", str(file), "--queue-limit", "9", "--drafter", "d:3"])
    assert (config.verifiers, config.drafters, config.queue_limit) == (("a:1", "b:2"), ("d:3",), 9)
    assert config.speculation.method is DraftMethod.NGRAM
    assert config.speculation.draft_tokens == 6


def test_flags_reach_into_the_defaults_of_speculation(tmp_path: Path) -> None:
    file = tmp_path / "router.toml"
    file.write_text(
        'model = "m"\nverifiers = ["a:1"]\n[speculation]\nlook_ahead = 1\nfan_out = 6\n'
    )
    config = parse_args(["--config", str(file), "--look-ahead", "0"])
    assert (config.speculation.look_ahead, config.speculation.fan_out) == (0, 6)
    assert parse_args(["--config", str(file), "--fan-out", "0"]).speculation.fan_out == 0
    with pytest.raises(InvalidRequestError, match="fan_out"):
        parse_args(["--config", str(file), "--fan-out", "65"])


def test_unknown_keys_and_bad_values_are_named(tmp_path: Path) -> None:
    file = tmp_path / "router.toml"
    file.write_text('model = "m"\nverifiers = ["a:1"]\nqueue_limits = 7\n')
    with pytest.raises(InvalidRequestError, match="queue_limits; did you mean queue_limit"):
        parse_args(["--config", str(file)])
    with pytest.raises(InvalidRequestError, match="verifier"):
        parse_args(["--model", "m"])
    with pytest.raises(InvalidRequestError, match="queue_limit"):
        parse_args(["--model", "m", "--verifier", "a:1", "--queue-limit", "-1"])
    with pytest.raises(NotFoundError):
        parse_args(["--config", str(tmp_path / "missing.toml")])


def test_a_mistake_is_one_json_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", str(tmp_path)]) == 2
    line = json.loads(capsys.readouterr().err)
    assert line["event"] == "failed" and "--verifier" in line["reason"]


def test_the_process_says_ready_serves_and_stops_on_sigterm(tmp_path: Path) -> None:
    model = make_tokenizer_dir(tmp_path / "model")
    command = [sys.executable, "-m", "outrider_router", "--model", str(model)]
    command += ["--listen", "127.0.0.1:0", "--verifier", "127.0.0.1:1", "--metrics-port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            ready = json.loads(process.stdout.readline())
            assert ready["event"] == "ready"
            with Client(ready["address"], retry=RetryPolicy(max_attempts=1)) as client:
                assert not client.server_info().verifiers[0].healthy
                assert client.models() == ()
                with pytest.raises(UnavailableError) as caught:
                    client.generate("a")
            assert caught.value.reason == "NO_VERIFIER"
            with urllib.request.urlopen(f"http://{ready['metrics']}/metrics") as answer:
                text = answer.read().decode()
            assert 'outrider_requests_total{outcome="unavailable"} 1.0' in text
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert process.stdout.read() == ""
        logs = [json.loads(line) for line in process.stderr.read().splitlines()]
    ended = [log for log in logs if log["event"] == "request ended"]
    assert len(ended) == 1 and ended[0]["request_id"].startswith("req-")


def test_clients_of_another_certificate_must_show_theirs_where_that_is_asked_for() -> None:
    config = parse_args(
        [
            *("--model", "m", "--verifier", "v:1", "--tls-client-auth"),
            *("--tls-cert", "c", "--tls-key", "k", "--tls-ca", "a"),
            *("--client-api-tls-cert", "fc", "--client-api-tls-key", "fk"),
        ]
    )
    served = config.client_tls
    assert (served.cert, served.ca, served.client_auth) == (Path("fc"), Path("a"), True)
