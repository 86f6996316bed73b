"""A router, two verifiers and a pool of drafters as processes, with the tiny model."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from outrider.client import Client, DrafterSummary, GenerateResult, ServerInfo, user
from outrider.client.commands.drafters import add_drafter
from tests.integration.stack import Process, metric
from tests.waiting import wait_until

PROMPT = [user("Count: 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5")]


class PoolStack:
    """Drafters d0 and d1 are configured; more can be started, by name."""

    def __init__(
        self,
        directory: Path,
        *,
        model: str,
        head: str,
        verifier: Sequence[str] = (),
        router: Sequence[str] = (),
    ) -> None:
        self._directory = directory
        self._drafter_flags = ["--model", model, "--head", head, "--methods", "eagle3"]
        flags = ["--model", model, "--feature-head", head, "--planner", "fixed", *verifier]
        self.verifiers = [
            Process(
                f"v{number}",
                "outrider_verifier",
                [*flags, "--verifier-id", f"v{number}"],
                directory / f"v{number}.log",
            )
            for number in range(2)
        ]
        self._router_flags = [*router, "--model", model, "--metrics-port", "0", "--pool-listen"]
        self.router = Process("router", "outrider_router", [], directory / "router.log")
        self.drafters: dict[str, Process] = {}

    def __enter__(self) -> PoolStack:
        try:
            for verifier in self.verifiers:
                verifier.start()
            for name in ("d0", "d1"):
                self.start_drafter(name)
            peers = [("--verifier", verifier.wait_ready()) for verifier in self.verifiers]
            peers += [("--drafter", drafter.wait_ready()) for drafter in self.drafters.values()]
            flags = [part for flag, process in peers for part in (flag, process.address)]
            self.router = Process(
                "router",
                "outrider_router",
                [*self._router_flags, "127.0.0.1:0", *flags],
                self._directory / "router.log",
            )
            self.router.start().wait_ready()
            self.repair()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def pool(self) -> str:
        """Where the router serves its operators."""
        address: str = self.router.ready["pool"]
        return address

    def start_drafter(self, name: str) -> Process:
        """Start a drafter that no router knows yet."""
        process = Process(
            name,
            "outrider_drafter",
            [*self._drafter_flags, "--drafter-id", name],
            self._directory / f"{name}.log",
        )
        self.drafters[name] = process.start()
        return process

    def repair(self) -> None:
        """As in the beginning: d0 and d1, alive and in the pool, nobody else, and all well: a
        verifier that is not gets no sessions."""
        for name in list(self.drafters):
            if name not in ("d0", "d1"):
                self.drafters.pop(name).stop()
        for process in self.drafters.values():
            if process.alive:
                process.thaw()
            else:
                process.restart()
            add_drafter(self.pool, process.address)
        both = {process.address for process in self.drafters.values()}

        def well() -> bool:
            info = self.info()
            linked = {d.address for d in info.drafters if len(d.links) == 2 and d.healthy}
            return both <= linked and all(verifier.healthy for verifier in info.verifiers)

        wait_until(well, timeout_s=30.0, what="two drafters at two verifiers")

    def info(self) -> ServerInfo:
        """What the router says."""
        with Client(self.router.address, timeout_s=5.0) as client:
            return client.server_info()

    def drafter(self, name: str) -> DrafterSummary | None:
        """What the router says of a drafter."""
        return next((d for d in self.info().drafters if d.drafter_id == name), None)

    def sessions_of(self, name: str) -> dict[str, int]:
        """A drafter's sessions, by verifier."""
        drafter = self.drafter(name)
        return {link.verifier_id: link.sessions for link in drafter.links} if drafter else {}

    def metric(self, name: str) -> float:
        """Sum of a counter of the router over its labels."""
        return metric(self.router, name)

    def stop(self) -> None:
        """End all processes."""
        for process in (self.router, *self.drafters.values(), *self.verifiers):
            process.stop()


class Requests:
    """Requests that run at the same time, each with a seed of its own."""

    def __init__(self, stack: PoolStack, count: int, tokens: int, **options: object) -> None:
        self._stack, self._tokens, self._options = stack, tokens, options
        self._threads = ThreadPoolExecutor(count)
        self._running = [self._threads.submit(self._run, seed) for seed in range(count)]

    def _run(self, seed: int) -> GenerateResult:
        options = {"temperature": 0.8, "seed": seed, **self._options}
        with Client(self._stack.router.address, timeout_s=120.0) as client:
            return client.generate(PROMPT, max_tokens=self._tokens, ignore_eos=True, **options)  # type: ignore[arg-type]

    def results(self) -> list[GenerateResult]:
        """All answers, by seed."""
        found = [running.result(timeout=120.0) for running in self._running]
        self._threads.shutdown()
        return found

    @property
    def futures(self) -> list[Future[GenerateResult]]:
        """One for each request."""
        return self._running
