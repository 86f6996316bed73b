"""A model that gives NaN for some prompts: those requests fail, and nobody else's."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from openai import InternalServerError, OpenAI

from outrider.client import Client
from outrider.errors import InternalError
from tests.integration.stack import Stack, connect, metric
from tests.reference.damaged_target import damage_embedding

BAD = 300
HEALTHY = list(range(40, 60))


@pytest.fixture(scope="module")
def stack(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("invalid")
    model = damage_embedding(tiny_target, directory / "model", [BAD])
    with Stack(
        directory,
        model=str(model),
        head="",
        router=["--http", "127.0.0.1:0", "--metrics-port", "0", "--model-name", "tiny"],
        verifier=["--metrics-port", "0"],
        with_drafter=False,
    ) as running:
        yield running


def test_requests_that_meet_nan_get_a_typed_error_and_others_their_text(stack: Stack) -> None:
    url = f"http://{stack.router.ready['http']}/v1"
    with connect(stack) as client, OpenAI(base_url=url, api_key="none", max_retries=0) as api:

        def text() -> tuple[int, ...]:
            return client.generate(
                HEALTHY, max_tokens=200, ignore_eos=True, banned_token_ids=[BAD]
            ).token_ids

        wanted = text()
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(text)
            _meet_nan(client, api)
            assert running.result() == wanted
    assert metric(stack.verifier, "outrider_verifier_invalid_outputs_total") == 2.0
    assert metric(stack.router, "outrider_failovers_total") == 0.0
    log = Path(stack.verifier._log_path).read_text(encoding="utf-8")
    assert log.count("model output invalid") == 1
    said = Path(stack.router._log_path).read_text(encoding="utf-8").splitlines()
    failed = [line for line in said if "MODEL_OUTPUT_INVALID" in line]
    assert len(failed) == 2 and all('"request_id"' in line for line in failed)


def _meet_nan(client: Client, api: OpenAI) -> None:
    """Ask for what the model cannot answer, over HTTP and gRPC."""
    with pytest.raises(InternalServerError, match="no finite logit") as over_http:
        api.completions.create(
            model="tiny", prompt=[5, 6, BAD], max_tokens=8, extra_body={"ignore_eos": True}
        )
    assert (over_http.value.status_code, over_http.value.code) == (500, "model_output_invalid")
    with pytest.raises(InternalError, match="no finite logit") as over_grpc:
        client.generate([BAD, 6, 7], max_tokens=8)
    assert over_grpc.value.reason == "MODEL_OUTPUT_INVALID"
