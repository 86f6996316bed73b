"""API keys: what a file of them may say, and whose a header is."""

from __future__ import annotations

import base64
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outrider_router.base.api_keys import ApiKey, KeysFile, find_key

from outrider.config import from_plain
from outrider.errors import InvalidRequestError, UnauthenticatedError

ALICE, BOB = "or-alice-secret", "or-bob-secret"


def key_of(secret: str, **values: object) -> dict[str, object]:
    return {"sha256": hashlib.sha256(secret.encode()).hexdigest(), **values}


KEYS = from_plain(KeysFile, {"keys": {"alice": key_of(ALICE), "bob": key_of(BOB)}}).keys


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.mark.parametrize(
    ("header", "name"),
    [
        (f"Bearer {ALICE}", "alice"),
        (f"bearer   {BOB} ", "bob"),
        (basic("whoever", BOB), "bob"),
        (basic("", ALICE), "alice"),
    ],
)
def test_a_key_is_found_by_its_hash(header: str, name: str) -> None:
    assert find_key(KEYS, header) == name


@pytest.mark.parametrize("header", [None, ""])
def test_no_key_is_told_from_a_wrong_one(header: str | None) -> None:
    with pytest.raises(UnauthenticatedError) as refused:
        find_key(KEYS, header)
    assert refused.value.reason == "NO_KEY"


@pytest.mark.parametrize(
    "header",
    [
        "Bearer",
        "Bearer ",
        ALICE,
        f"Bearer {ALICE}x",
        f"Bearer {ALICE[:-1]}",
        f"Digest {ALICE}",
        f"Bearer {hashlib.sha256(ALICE.encode()).hexdigest()}",
        "Basic !!!",
        "Basic " + base64.b64encode(b"\xff\xfe:\xff").decode(),
        basic("alice", ""),
        basic("alice", "alice"),
        "Bearer " + "a" * 2000,
        "Bearer \udcff\udcfe",
        "Bearer \x00",
    ],
)
def test_a_wrong_key_is_nobodys_and_is_not_repeated(header: str) -> None:
    with pytest.raises(UnauthenticatedError) as refused:
        find_key(KEYS, header)
    assert refused.value.reason == "WRONG_KEY"
    assert ALICE not in refused.value.message


ODD = st.text(st.characters(codec=None)) | st.text("Bearsic =:+/\t", max_size=40)


@given(scheme=st.sampled_from(["Bearer ", "Basic ", "", "\x00"]), rest=ODD)
def test_no_header_whatever_is_anything_but_refused(scheme: str, rest: str) -> None:
    with pytest.raises(UnauthenticatedError):
        find_key(KEYS, scheme + rest)


@given(st.binary())
def test_no_password_whatever_is_anything_but_refused(data: bytes) -> None:
    with pytest.raises(UnauthenticatedError):
        find_key(KEYS, "Basic " + base64.b64encode(data).decode())


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"a": {"sha256": ALICE}}, "64 hexadecimal"),
        ({"a": {"sha256": "A" * 64}}, "64 hexadecimal"),
        ({"a": {}}, "missing configuration keys: keys.a.sha256"),
        ({"": key_of(ALICE)}, "1 to 64 characters"),
        ({"a": key_of(ALICE), "b": key_of(ALICE)}, "one name only"),
        ({"a": key_of(ALICE, requests_per_s=-1.0)}, "finite and not negative"),
        ({"a": key_of(ALICE, max_tokens=-1)}, ">= 0"),
        ({"a": key_of(ALICE, max_concurent=1)}, "did you mean keys.a.max_concurrent"),
        ({"a": key_of(ALICE, tenant="t" * 65)}, "at most 64"),
    ],
)
def test_a_file_that_is_no_good_says_why_and_shows_no_secret(
    keys: dict[str, object], said: str
) -> None:
    with pytest.raises(InvalidRequestError, match=said) as refused:
        from_plain(KeysFile, {"keys": keys})
    assert ALICE not in refused.value.message


def test_a_key_bounds_nothing_unless_told() -> None:
    key = ApiKey(sha256="0" * 64)
    assert not (key.requests_per_s or key.max_concurrent or key.max_tokens or key.operator)
