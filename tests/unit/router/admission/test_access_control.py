"""Access control: API keys from a file, their limits, and reloads of the file."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from outrider_router.admission.access_control import RELOAD_INTERVAL_S, AccessControl, AccessGrant
from outrider_router.base.metrics import RouterMetrics
from outrider_router.base.tenants import ANONYMOUS, Caller, TenantSource
from outrider_router.config import OverloadConfig, RouterConfig

from outrider.errors import (
    InvalidRequestError,
    NotFoundError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
)
from outrider.wire.inference import GenerateRequest, StoppingOptions, TextPrompt

REQUEST = GenerateRequest(prompt=TextPrompt("a"))


class Bed:
    """An access control on a clock that tests set."""

    def __init__(self, path: Path | None, source: TenantSource = TenantSource.NONE) -> None:
        self.now = 100.0
        self.metrics = RouterMetrics()
        config = RouterConfig(
            model=Path("m"),
            verifiers=("v",),
            api_keys=path,
            default_max_tokens=100,
            overload=OverloadConfig(tenant_from=source),
        )
        self.access_control = AccessControl(config, self.metrics, clock=lambda: self.now)

    def count(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"outrider_{name}", labels) or 0.0


def write(path: Path, **keys: str) -> Path:
    """A file of keys by name, each with further lines; the secret of `a` is "secret-a"."""
    tables = (
        f'[keys.{name}]\nsha256 = "{hashlib.sha256(f"secret-{name}".encode()).hexdigest()}"\n'
        f"{lines}\n"
        for name, lines in keys.items()
    )
    path.write_text("".join(tables))
    # Another modification time, however coarse the clock of the file system is.
    status = path.stat()
    os.utime(path, (status.st_atime, status.st_mtime + len(keys) + len("".join(keys.values()))))
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


def enter(bed: Bed, caller: Caller, request: GenerateRequest = REQUEST) -> AccessGrant:
    (passed,) = bed.access_control.enter_requests(caller, [request])
    return passed


def bearer(name: str) -> str:
    return f"Bearer secret-{name}"


def test_without_keys_everybody_may_come_in() -> None:
    bed = Bed(None)
    assert (
        bed.access_control.authorize(None) == bed.access_control.authorize("Bearer x") == ANONYMOUS
    )
    bed.access_control.authorize_operator(None)
    named = Bed(None, TenantSource.METADATA)
    assert named.access_control.identify_caller([("x-outrider-tenant", "blue")]) == Caller(
        tenant="blue"
    )


def test_a_key_says_whose_tenant_its_caller_is_and_metadata_does_not(path: Path) -> None:
    bed = Bed(write(path, a="", b='tenant = "team"'), TenantSource.METADATA)
    assert bed.access_control.authorize(bearer("a")) == Caller(tenant="a", key_name="a")
    liar = [("x-outrider-tenant", "a"), ("authorization", bearer("b").encode())]
    assert bed.access_control.identify_caller(liar) == Caller(tenant="team", key_name="b")
    with pytest.raises(UnauthenticatedError):
        bed.access_control.identify_caller([("x-outrider-tenant", "a")])


def test_who_is_turned_away_is_counted_by_reason(path: Path) -> None:
    bed = Bed(write(path, a="", boss="operator = true"))
    for header, times in ((None, 2), ("Bearer x", 3)):
        for _ in range(times):
            with pytest.raises(UnauthenticatedError):
                bed.access_control.authorize(header)
    with pytest.raises(PermissionDeniedError) as refused:
        bed.access_control.authorize_operator(bearer("a"))
    assert refused.value.reason == "NOT_OPERATOR"
    bed.access_control.authorize_operator(bearer("boss"))
    counts = [
        bed.count("access_refusals_total", reason=reason)
        for reason in ("NO_KEY", "WRONG_KEY", "NOT_OPERATOR")
    ]
    assert counts == [2, 3, 1]


def test_a_keys_rate_is_a_bucket_that_says_when_to_come_again(path: Path) -> None:
    bed = Bed(write(path, a="requests_per_s = 2.0\nrequests_burst = 3.0", b=""))
    caller = bed.access_control.authorize(bearer("a"))
    for _ in range(3):
        enter(bed, caller)
    with pytest.raises(ResourceExhaustedError) as refused:
        enter(bed, caller)
    assert refused.value.reason == "KEY_RATE_LIMITED"
    assert refused.value.retry_after_s == pytest.approx(0.5)
    enter(bed, bed.access_control.authorize(bearer("b")))
    bed.now += 0.5
    enter(bed, caller)
    assert bed.count("refusals_total", reason="KEY_RATE_LIMITED") == 1


def test_a_key_has_so_many_requests_at_once_whoever_uses_it(path: Path) -> None:
    bed = Bed(write(path, a="max_concurrent = 2"))
    caller = bed.access_control.authorize(bearer("a"))
    first, _ = enter(bed, caller), enter(bed, caller)
    with pytest.raises(ResourceExhaustedError) as refused:
        enter(bed, caller)
    assert refused.value.reason == "KEY_BUSY" and refused.value.retry_after_s
    first.release()
    first.release()
    enter(bed, caller)
    with pytest.raises(ResourceExhaustedError):
        enter(bed, caller)


def test_what_is_asked_for_at_once_is_let_in_as_a_whole_or_not_at_all(path: Path) -> None:
    bed = Bed(write(path, a="max_concurrent = 3"))
    caller = bed.access_control.authorize(bearer("a"))
    passes = bed.access_control.enter_requests(caller, [REQUEST] * 2)
    with pytest.raises(ResourceExhaustedError) as refused:
        bed.access_control.enter_requests(caller, [REQUEST] * 2)
    assert refused.value.reason == "KEY_BUSY"
    passes[0].release()
    passes = bed.access_control.enter_requests(caller, [REQUEST] * 2)
    with pytest.raises(ResourceExhaustedError), bed.access_control.limit_call(caller):
        raise AssertionError("there is no room")
    passes[0].release()
    with bed.access_control.limit_call(caller), pytest.raises(ResourceExhaustedError):
        enter(bed, caller)
    enter(bed, caller)


@pytest.mark.parametrize(
    ("limits", "most"),
    [("max_concurrent = 2", 2), ("requests_per_s = 0.5", 1), ("requests_per_s = 2.5", 2)],
)
def test_more_at_once_than_a_key_ever_has_is_no_matter_of_waiting(
    path: Path, limits: str, most: int
) -> None:
    bed = Bed(write(path, a=limits))
    caller = bed.access_control.authorize(bearer("a"))
    with pytest.raises(InvalidRequestError, match=f"this request counts as {most + 1}") as refused:
        bed.access_control.enter_requests(caller, [REQUEST] * (most + 1))
    assert refused.value.reason == "KEY_TOO_MANY"
    assert len(bed.access_control.enter_requests(caller, [REQUEST] * most)) == most


def test_a_key_bounds_the_length_that_may_be_asked_for(path: Path) -> None:
    bed = Bed(write(path, a="max_tokens = 40"))
    caller = bed.access_control.authorize(bearer("a"))
    assert enter(bed, caller).request.stopping.default_max_tokens == 40
    short = StoppingOptions(default_max_tokens=16)
    request = GenerateRequest(prompt=TextPrompt("a"), stopping=short)
    assert enter(bed, caller, request).request.stopping == short
    fits = GenerateRequest(prompt=TextPrompt("a"), stopping=StoppingOptions(max_tokens=40))
    assert enter(bed, caller, fits).request == fits
    long = GenerateRequest(prompt=TextPrompt("a"), stopping=StoppingOptions(max_tokens=41))
    with pytest.raises(InvalidRequestError, match="max_tokens must be at most 40"):
        enter(bed, caller, long)
    forced = GenerateRequest(prompt=TextPrompt("a"), stopping=StoppingOptions(min_tokens=41))
    with pytest.raises(InvalidRequestError, match="min_tokens must be at most 40"):
        enter(bed, caller, forced)


def test_a_key_bounds_the_priority_that_may_be_asked_for(path: Path) -> None:
    bed = Bed(write(path, a="max_priority = 0"))
    caller = bed.access_control.authorize(bearer("a"))
    for priority in (-100, 0):
        enter(bed, caller, GenerateRequest(prompt=TextPrompt("a"), priority=priority))
    with pytest.raises(InvalidRequestError, match="at most 0"):
        enter(bed, caller, GenerateRequest(prompt=TextPrompt("a"), priority=1))


def test_a_changed_file_counts_within_a_second_and_a_bad_one_not_at_all(path: Path) -> None:
    bed = Bed(write(path, a=""))
    write(path, b="")
    bed.access_control.authorize(bearer("a"))
    bed.now += RELOAD_INTERVAL_S
    with pytest.raises(UnauthenticatedError):
        bed.access_control.authorize(bearer("a"))
    assert bed.access_control.authorize(bearer("b")).key_name == "b"
    path.write_text("[keys")
    bed.now += RELOAD_INTERVAL_S
    assert bed.access_control.authorize(bearer("b")).key_name == "b"
    assert bed.count("api_keys_failing") == 1
    path.unlink()
    bed.access_control.reload_keys()
    assert bed.access_control.authorize(bearer("b")).key_name == "b"
    write(path, a="", c="")
    bed.access_control.reload_keys()
    assert bed.access_control.authorize(bearer("c")).key_name == "c"
    assert bed.count("api_keys_failing") == 0


def test_a_bad_file_is_told_of_when_it_goes_bad_and_not_at_every_look(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bed = Bed(write(path, a=""))

    def told_after_looks(count: int) -> int:
        caplog.clear()
        for _ in range(count):
            bed.now += RELOAD_INTERVAL_S
            bed.access_control.authorize(bearer("a"))
        return sum(record.levelname == "ERROR" for record in caplog.records)

    path.write_text("[keys")
    assert told_after_looks(5) == 1
    path.unlink()
    assert told_after_looks(5) == 1
    bed.access_control.reload_keys()
    assert told_after_looks(1) == 0
    write(path, a="", b="")
    assert told_after_looks(1) == 0 and bed.access_control.authorize(bearer("b")).key_name == "b"
    path.unlink()
    assert told_after_looks(2) == 1, "it was well in between"


def test_a_file_that_could_not_be_read_is_tried_again_unchanged(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed(write(path, a=""))
    write(path, b="")

    def locked(_path: Path) -> None:
        raise NotFoundError("no rights")

    bed.now += RELOAD_INTERVAL_S
    with monkeypatch.context() as patched:
        patched.setattr("outrider_router.admission.access_control.read_keys", locked)
        assert bed.access_control.authorize(bearer("a")).key_name == "a"
    bed.now += RELOAD_INTERVAL_S
    assert bed.access_control.authorize(bearer("b")).key_name == "b"


def test_new_limits_count_for_the_next_request(path: Path) -> None:
    bed = Bed(write(path, a="max_concurrent = 1"))
    caller = bed.access_control.authorize(bearer("a"))
    enter(bed, caller)
    write(path, a="max_concurrent = 2")
    bed.access_control.reload_keys()
    enter(bed, caller)
    with pytest.raises(ResourceExhaustedError):
        enter(bed, caller)


def test_a_router_does_not_start_with_keys_that_it_cannot_read(path: Path) -> None:
    with pytest.raises(NotFoundError):
        Bed(path)
    path.write_text('[keys.a]\nsha256 = "x"\n')
    with pytest.raises(InvalidRequestError):
        Bed(path)
