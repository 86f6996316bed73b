"""Ends sessions after a failed round or a lost device; engine thread only."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from outrider.errors import InternalError, OutriderError, UnavailableError
from outrider.watchdog import record_step
from outrider_verifier.engine.core import EngineCore
from outrider_verifier.model_runner.interface import ModelRunner
from outrider_verifier.state.session import Session
from outrider_verifier.state.session_phase import ENDED

logger = logging.getLogger(__name__)


def device_lost_error() -> UnavailableError:
    """For whoever is served by, or calls, a verifier whose device does not work any more."""
    return UnavailableError("the verifier has lost its device", reason="DEVICE_LOST")


def engine_stalled_error() -> UnavailableError:
    """The error of sessions and calls of a verifier whose engine thread hangs."""
    return UnavailableError("the engine of the verifier makes no progress", reason="ENGINE_STALLED")


class FailureHandler:
    """Ends the sessions of a failed round and checks whether the device is the reason."""

    def __init__(self, core: EngineCore, engine: ModelRunner) -> None:
        self._core, self._engine = core, engine
        self.device_lost = False
        """Whether the device was found not to work after a failure; no round can follow."""

    def check_device(self, bug: BaseException | None) -> None:
        """After a failure, `bug` if it is known: note whether the device is the reason."""
        if self.device_lost or self._engine.is_usable:
            return
        self.device_lost = True
        self._core.counters["device_losses"] += 1
        logger.critical("the device is lost", exc_info=bug)

    def fail_session(self, session: Session, bug: Exception) -> None:
        """A session could not be admitted."""
        if isinstance(bug, OutriderError):
            self._core.fail_session(session, bug)
        else:
            self.fail_round([session], bug)

    def fail_round(self, sessions: Sequence[Session], bug: Exception) -> None:
        """A round failed, and with it whoever was to be in it."""
        self._core.counters["failed_rounds"] += 1
        record_step()
        self.check_device(bug)
        error: OutriderError
        if self.device_lost:
            error = device_lost_error()
        else:
            logger.error("round failed", exc_info=bug, extra={"sessions": len(sessions)})
            error = InternalError(
                f"the round failed: {type(bug).__name__}: {bug}", reason="ROUND_FAILED"
            )
        for session in sessions:
            if session.phase is not ENDED:
                self._core.fail_session(session, error)
