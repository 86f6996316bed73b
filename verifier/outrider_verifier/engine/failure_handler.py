"""Ends sessions after a failed round or a lost device. Used on the engine thread only."""

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
    """Return the error for sessions and calls of a verifier whose device no longer works."""
    return UnavailableError("the verifier has lost its device", reason="DEVICE_LOST")


def engine_stalled_error() -> UnavailableError:
    """Return the error for sessions and calls of a verifier whose engine thread hangs."""
    return UnavailableError("the engine of the verifier makes no progress", reason="ENGINE_STALLED")


class FailureHandler:
    """Ends the sessions of a failed round and checks whether the device has failed."""

    def __init__(self, core: EngineCore, engine: ModelRunner) -> None:
        self._core, self._engine = core, engine
        self.device_lost = False
        """Whether the device stopped working; if True, no further round can run."""

    def check_device(self, bug: BaseException | None) -> None:
        """After a failure, set `device_lost` if the device no longer works. `bug` is the exception
        to log, if there is one."""
        if self.device_lost or self._engine.is_usable:
            return
        self.device_lost = True
        self._core.counters["device_losses"] += 1
        logger.critical("the device is lost", exc_info=bug)

    def fail_session(self, session: Session, bug: Exception) -> None:
        """Fail a session that could not be admitted because of `bug`."""
        if isinstance(bug, OutriderError):
            self._core.fail_session(session, bug)
        else:
            self.fail_round([session], bug)

    def fail_round(self, sessions: Sequence[Session], bug: Exception) -> None:
        """Record a failed round and end the streams of its `sessions` with an error. `bug` is the
        exception that the round raised."""
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
