"""A drafter that only says who it is and remembers what it was told."""

from __future__ import annotations

from dataclasses import replace

from outrider.errors import ConnectionLostError
from outrider.ids import DrafterId
from outrider.spec.plan import DraftMethod
from outrider.wire.messages import (
    PROTOCOL_VERSION,
    AttachedDrafter,
    DrafterInfo,
    FeatureLayout,
)
from tests.fakes.verifier import FakeVerifier


class FakeDrafter:
    """Implements `DrafterEndpoint`; attaching makes the fake verifier list it."""

    def __init__(
        self,
        verifiers: dict[str, FakeVerifier],
        *,
        name: str = "d0",
        methods: tuple[DraftMethod, ...] = (DraftMethod.EAGLE3, DraftMethod.NGRAM),
        vocab_size: int = 259,
    ) -> None:
        self.lost = False
        self.attached: list[str] = []
        """Addresses that it was told to attach to, in order."""
        self.detached: list[str] = []
        """The same of those that it was told to leave."""
        self._verifiers = verifiers
        self.described = DrafterInfo(
            protocol_version=PROTOCOL_VERSION,
            drafter_id=DrafterId(name),
            incarnation="1",
            vocab_size=vocab_size,
            tokenizer_hash="",
            methods=methods,
            feature_layout=FeatureLayout.NONE,
            feature_fingerprint="",
            sessions=0,
            verifiers=(),
        )

    def change_info(self, **changes: object) -> None:
        """Change what `info` answers."""
        self.described = replace(self.described, **changes)  # type: ignore[arg-type]

    async def info(self) -> DrafterInfo:
        if self.lost:
            raise ConnectionLostError("drafter is gone", reason="PEER_LOST")
        return self.described

    async def attach(self, verifier_address: str) -> None:
        self.attached.append(verifier_address)
        self._verifiers[verifier_address].attach(
            AttachedDrafter(
                drafter_id=self.described.drafter_id,
                incarnation=self.described.incarnation,
                methods=self.described.methods,
                sessions=0,
            )
        )

    async def detach(self, verifier_address: str) -> None:
        self.detached.append(verifier_address)
        self._verifiers[verifier_address].detach(self.described.drafter_id)

    async def set_draining(self, draining: bool) -> None:
        self.change_info(draining=draining)
