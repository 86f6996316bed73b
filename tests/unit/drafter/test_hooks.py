"""Hook points of a drafter: wrappers of its access and of its proposers, and what is told."""

from __future__ import annotations

from pathlib import Path

from outrider_drafter.config import DrafterConfig
from outrider_drafter.hooks import DrafterHooks, VerifierAccess
from outrider_drafter.proposers.interface import Proposer
from outrider_drafter.server.build import build_service

from outrider.spec.plan import DraftMethod
from outrider.transport.in_process import InprocNetwork
from outrider.transport.shm import ShmChannel, join_channel
from outrider.wire.messages import ShmOffer
from tests.factories import make_target


def refuse(_offer: ShmOffer) -> ShmChannel:
    raise AssertionError("nobody joins")


def test_nothing_is_wrapped_where_no_hook_asks_for_it() -> None:
    access = VerifierAccess(InprocNetwork().dialer())
    assert DrafterHooks().wrap_access(access) is access
    assert access.join is join_channel
    assert DrafterHooks().handicap == ""


def test_wrappers_of_the_access_are_called_in_order() -> None:
    first, second = InprocNetwork().dialer(), InprocNetwork().dialer()
    seen = []

    def wrap(access: VerifierAccess) -> VerifierAccess:
        seen.append(access)
        return VerifierAccess(second, refuse)

    hooks = DrafterHooks(access_wrappers=[wrap, wrap])
    assert hooks.wrap_access(VerifierAccess(first)) == (second, refuse)
    assert [access.dialer for access in seen] == [first, second]


async def test_each_proposer_is_wrapped_and_handicaps_are_told(tmp_path: Path) -> None:
    seen: list[Proposer] = []

    def wrap(proposer: Proposer) -> Proposer:
        seen.append(proposer)
        return proposer

    hooks = DrafterHooks(proposer_wrappers=[wrap], handicaps=["slow", "far away"])
    target = str(make_target(tmp_path / "target"))
    config = DrafterConfig(
        model=target,
        draft_model=target,
        methods=(DraftMethod.NGRAM, DraftMethod.MODEL),
        threads=1,
    )
    access = VerifierAccess(InprocNetwork().dialer())
    service = build_service(config, access, hooks=hooks)
    try:
        assert [proposer.method for proposer in seen] == [DraftMethod.NGRAM, DraftMethod.MODEL]
        assert (await service.info()).handicap == "slow, far away"
    finally:
        await service.close()
