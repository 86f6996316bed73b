"""Outrider behind Ray Serve: answers, the loss of its replica, and the end of the application."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.integration.ray_nodes import free_port

SCRIPT_S = 480.0
pytestmark = pytest.mark.timeout(SCRIPT_S + 60.0)


@pytest.fixture(scope="module")
def served(tiny_target: Path) -> dict[str, Any]:
    """What `ray_serving` says."""
    made = [sys.executable, "-m", "tests.integration.ray_serving", str(free_port())]
    # Sockets lie below it, whose paths must be short.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as directory:
        said = subprocess.run(
            [*made, str(tiny_target), str(Path(directory, "journal"))],
            stdout=subprocess.PIPE,
            text=True,
            timeout=SCRIPT_S,
            check=True,
            # Else Ray writes a token into the home folder.
            env=os.environ | {"RAY_TMPDIR": directory, "RAY_AUTH_MODE": "disabled"},
        )
    found: dict[str, Any] = json.loads(said.stdout.splitlines()[-1])
    return found


def test_a_serve_application_answers_over_http(served: dict[str, Any]) -> None:
    assert list(served["members"]) == ["drafter-0", "verifier-0"]
    assert "".join(served["streamed"]) == served["whole"] != ""
    assert len(served["streamed"]) > 1


def test_actors_outlive_a_killed_serve_replica_and_texts_go_on_or_end_typed(
    served: dict[str, Any],
) -> None:
    assert all(served["members"].values())
    assert served["members_after"] == served["members"]
    assert served["whole_after"] == served["whole"]
    # A stream of the SDK is resumed by the journal; one over HTTP is visibly cut.
    assert served["ends"] == {"grpc": "the same text", "http": "cut with an error"}


def test_a_deleted_serve_application_takes_its_actors_with_it(served: dict[str, Any]) -> None:
    assert served["left"] == []
    # Those whose replica was killed just before ended, too.
    assert all(served["orphans"].values())
