"""`outrider bench round-census`: how many modules and classes take part in a round.

A local fleet of a router, a verifier and a drafter serves long greedy streams, first with drafts
and then without. Meanwhile all calls of the verifier and of the drafter are recorded for some
rounds (see `outrider_bench.hooks.call_census`). The numbers show how much code a new developer has
to know: the fewer modules and classes of this project take part in most rounds, the less. The same
is counted for a request in the router, from its arrival to its first text (see
`outrider_bench.request_census`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from outrider.client import Client, user
from outrider.client.flags import integer_at_least
from outrider.client.local.cluster import START_TIMEOUT_S, LocalCluster
from outrider.errors import OutriderError, UnavailableError
from outrider_bench.environment import describe
from outrider_bench.faults.repair import poll_until, wait_idle
from outrider_bench.models import add_model_arguments, describe_placement, local_config
from outrider_bench.prompts import load_prompts
from outrider_bench.report import format_table, print_progress, print_result
from outrider_bench.request_census import count_requests

MODES: Final = {"drafted": "eagle3", "plain": "none"}
"""Draft method that the streams request, by kind of round."""
PROCESSES: Final = ("verifier", "drafter")
BEGUN: Final = 4
"""Number of tokens that each stream must have received before calls are recorded."""
ROUND: Final = {
    "verifier": "outrider_verifier.engine.round_executor/run_round",
    "drafter": "outrider_drafter.state.session_table/apply_verdicts",
}
"""Function whose call begins a round, by process."""
MIN_ROUNDS: Final = 5
"""Minimum number of recorded rounds."""
_LOOK_S: Final = 8.0
"""Seconds for which calls are recorded."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_model_arguments(parser)
    add = parser.add_argument
    add("--streams", type=integer_at_least(1), default=4, help="streams at a time; default: 4")
    add("--max-tokens", type=integer_at_least(16), default=400, help="of a stream; default: 400")
    add("--list", action="store_true", help="also list the files and the kinds")


def run(args: argparse.Namespace) -> None:
    """Run the benchmark and print its table. Raises UnavailableError if a stream ended before the
    recording."""
    with tempfile.TemporaryDirectory(prefix="outrider-") as directory:
        census = _Census(args, Path(directory))
        found = {mode: census.count(mode) for mode in MODES} | census.requests
    config = census.config
    result: dict[str, Any] = {"benchmark": "round-census", **describe()}
    result |= {"model": config.model_name, **describe_placement(config), "streams": args.streams}
    result |= found
    rows: list[list[object]] = [
        [
            process,
            mode,
            len(lists["files"]),
            _count_package_files(process, lists["files"]),
            len(lists["kinds"]),
        ]
        for mode, processes in found.items()
        for process, lists in processes.items()
    ]
    headers = ("process", "of", "files", "of its own package", "kinds of object")
    print(format_table(headers, rows))
    if args.list:
        for mode, processes in found.items():
            for process, lists in processes.items():
                for what, names in lists.items():
                    print(f"\n{process}, {mode}, {what}:\n" + "\n".join(names))
    print_result(args, result)


def _count_package_files(process: str, files: Sequence[str]) -> int:
    return sum(name.startswith(f"outrider_{process}.") for name in files)


class _Census:
    """Records the rounds of one fleet at a time, whose verifier and drafter run the hook
    `call_census`."""

    def __init__(self, args: argparse.Namespace, directory: Path) -> None:
        self._args, self._directory = args, directory
        self.requests: dict[str, dict[str, dict[str, list[str]]]] = {}
        """Result of `count_requests` for requests with drafts."""
        self.config = replace(
            local_config(args, max_sessions=2 * args.streams),
            verifier_hooks=(self._hook("verifier"),),
            drafter_hooks=(self._hook("drafter"),),
        )

    def _hook(self, process: str) -> str:
        switch, out = self._directory / f"{process}.on", self._directory / f"{process}.json"
        return f"outrider_bench.hooks.call_census:switch={switch},out={out},round={ROUND[process]}"

    def count(self, mode: str) -> dict[str, dict[str, list[str]]]:
        """Return the `files` and `kinds` of a steady round by process. `mode` is the kind of round,
        a key of MODES."""
        with LocalCluster(self.config, progress=print_progress) as fleet:
            wait_idle(fleet)
            begun = [threading.Event() for _ in range(self._args.streams)]
            ended = threading.Event()
            prompts = load_prompts(self._args.prompts, self._args.limit)
            if mode == "drafted":
                self.requests = count_requests(
                    fleet, self.config, text=prompts[0].text, drafter=MODES[mode]
                )
            threads = [
                threading.Thread(
                    target=self._follow,
                    args=(fleet.address, prompts[i % len(prompts)].text, mode, each, ended),
                    daemon=True,
                )
                for i, each in enumerate(begun)
            ]
            for thread in threads:
                thread.start()
            if not all(each.wait(START_TIMEOUT_S) for each in begun):
                raise UnavailableError("streams did not begin", reason="CENSUS")
            found = self._look(PROCESSES if mode == "drafted" else PROCESSES[:1])
            if ended.is_set():
                raise UnavailableError("a stream ended meanwhile: --max-tokens", reason="CENSUS")
            return found

    def _look(self, processes: tuple[str, ...]) -> dict[str, dict[str, list[str]]]:
        for process in processes:
            (self._directory / f"{process}.on").touch()
        time.sleep(_LOOK_S)
        found: dict[str, Any] = {}
        for process in processes:
            (self._directory / f"{process}.on").unlink()
        for process in processes:
            out = self._directory / f"{process}.json"
            if not poll_until(out.exists):
                raise UnavailableError(f"the {process} has written nothing", reason="CENSUS")
            found[process] = json.loads(out.read_text())
            out.unlink()
            if (rounds := found[process].pop("rounds")) < MIN_ROUNDS:
                raise UnavailableError(f"only {rounds} rounds of the {process}", reason="CENSUS")
            print_progress(f"{rounds} rounds of the {process}")
        return found

    def _follow(
        self, address: str, text: str, mode: str, begun: threading.Event, ended: threading.Event
    ) -> None:
        with (
            # Its fleet is stopped before the stream ends.
            contextlib.suppress(OutriderError),
            Client(address, timeout_s=300.0) as client,
            client.stream(
                [user(text)],
                drafter=MODES[mode],
                temperature=0.0,
                max_tokens=self._args.max_tokens,
                ignore_eos=True,
            ) as answer,
        ):
            count = 0
            for delta in answer:
                count += len(delta.token_ids)
                if count >= BEGUN:
                    begun.set()
        ended.set()
