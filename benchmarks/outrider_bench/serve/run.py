"""One run of the serving benchmark: services to start, cells to measure, and cells left out."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from outrider.client.local.config import CUDA, SEPARATE, default_dtype
from outrider.client.local.model_files import ModelFiles, find_model
from outrider.engine.checkpoint import load_model_config
from outrider.errors import InvalidRequestError, OutriderError
from outrider.models import model_dir
from outrider.spec.exchange_mode import AUTO, ON
from outrider.spec.plan import DraftMethod
from outrider_bench.environment import describe
from outrider_bench.gpu.support.machine import DEVICE_COPY_BYTES_S
from outrider_bench.gpu.support.widening import weight_bytes
from outrider_bench.prompts import load_prompts
from outrider_bench.report import print_progress
from outrider_bench.serve import results
from outrider_bench.serve.cells import (
    LOOK_AHEAD,
    NO_HANDICAP,
    PLACEMENTS,
    PLAIN,
    SETS,
    BenchCell,
    DrafterHandicap,
    DraftSetting,
    SamplingSetting,
    parse_drafts,
    parse_list,
    plain_key,
)
from outrider_bench.serve.clients import ClientProcesses, default_processes
from outrider_bench.serve.fleet import (
    BenchService,
    RunningFleet,
    ServiceMachine,
    connect_router,
    drafts_at,
    placement_of,
    plan_services,
    start_service,
)
from outrider_bench.serve.measurement import START_S, CellMeter, TimeBudget
from outrider_bench.serve.round_baseline import read_baseline
from outrider_bench.serve.widened_model import bench_model
from outrider_bench.serve.workload import MIN_REQUESTS, REQUESTS, WaveSize

OPEN_SESSIONS: Final = 64
"""Number of sessions that services support in an open loop."""
_HERE: Final = ("127.0.0.1", "localhost", "[::1]")
GRID_TEMPERATURES: Final = (0.0, 0.7, 1.0, 1.5, 2.0)
GRID_DRAFTS: Final = "chain-3,tree-32,ngram"
GRID_SESSIONS: Final = "1,8,32,64"
GRID_PLACEMENTS: Final = "separate,colocated,fused"
GRID_SIZE: Final = WaveSize(per_session=2, min_requests=8)


class BenchRun:
    """One run of the benchmark. It measures one service after another and writes the results file
    after each cell."""

    def __init__(self, args: argparse.Namespace, busy_cores: dict[str, int]) -> None:
        """Read the flags. Raises InvalidRequestError for invalid ones."""
        self.failed: list[str] = []
        """Descriptions of the services and cells whose measurement failed."""
        self._args, grid = args, args.grid
        self._budget = TimeBudget(args.budget_s)
        self._max_tokens = args.max_tokens or (64 if grid else 256)
        self._waves = args.waves or (2 if grid else 3)
        size = GRID_SIZE if grid else WaveSize(per_session=REQUESTS, min_requests=MIN_REQUESTS)
        least = args.requests or size.min_requests
        self._size = WaveSize(per_session=size.per_session, min_requests=least)
        self._sessions = parse_sessions(args.sessions or (GRID_SESSIONS if grid else "1,8,32"))
        self._drafts = drafts_of(args)
        self._samplings = samplings_of(args)
        self._about = results.about()
        self._content = results.read(args.out, self._about["commit"]) | self._about
        self._content |= {"cells": self._content.get("cells", [])}
        self._left_out: list[dict[str, object]] = []
        here = results.machine_words()
        self._kept_plain = {
            plain_key(cell): cell
            for cell in (self._content["cells"] if args.keep_plain else ())
            if cell["placement"] == PLAIN and cell["machine"] == here
        }
        if args.router is None:
            names = args.placement or (GRID_PLACEMENTS if grid else SEPARATE)
            wanted = parse_list(names, PLACEMENTS, "--placement")
            places = placements_of(wanted, args.in_turn)
            self._services = plan_services(places, self._drafts, busy_cores, handicaps_of(args))
        elif handicaps_of(args) != (NO_HANDICAP,):
            raise InvalidRequestError(
                "--exchange-delay-ms and --drafter-slowdown are for drafters that are started here",
                reason="INVALID_FLAG",
            )

    def measure(self) -> dict[str, Any]:
        """Measure every cell that the time budget allows, and return the content of the results
        file."""
        args = self._args
        prompts = load_prompts(args.prompts, args.limit)
        with ClientProcesses(args.clients or default_processes()) as clients:
            meter = CellMeter(
                clients=clients,
                prompts=prompts,
                size=self._size,
                waves=self._waves,
                in_turn=args.in_turn,
                about={"machine": results.machine_words()},
                plain=dict(self._kept_plain),
            )
            print_progress(f"{clients.count} client processes, {len(prompts)} prompts")
            if args.router is not None:
                self._measure_router(meter)
            else:
                machine = self._machine()
                self._know_model(meter, machine.files.path, machine.device, machine.dtype)
                for service in self._services:
                    self._measure_service(meter, machine, service)
        return self._merged()

    def _machine(self) -> ServiceMachine:
        args = self._args
        dtype = args.dtype or default_dtype(args.device)
        files = bench_model(args.model, args.head, wide=args.wide, dtype=dtype, device=args.device)
        draft_model = None if args.draft_model is None else find_model(args.draft_model).path
        _check_files(files, self._drafts)
        return ServiceMachine(
            files=files,
            device=args.device,
            dtype=dtype,
            draft_model=draft_model,
            sessions=OPEN_SESSIONS if args.rate is not None else max(self._sessions),
            verifiers=args.verifiers,
            drafters=args.drafters,
            routers=args.routers,
            prefix_cache=not args.no_prefix_cache,
            device_exchange=args.device_exchange or AUTO,
            batch_invariant=args.batch_invariant,
            max_tokens=self._max_tokens,
            threads=args.threads,
            planner=args.planner,
            log_dir=args.log_dir,
            trace_dir=args.trace_dir,
            round_ms=args.round_ms,
            row_us=args.row_us,
        )

    def _know_served(self, meter: CellMeter, name: str) -> None:
        """Set the baseline for the model that a running router on this host serves, if the model's
        files are known.

        They are those in the directory --model or, if it is no directory, those of a model on this
        machine with the served name.
        """
        args = self._args
        if args.router.rpartition(":")[0] not in _HERE:
            return
        given = Path(args.model)
        path = given if given.is_dir() else model_dir(name)
        if (path / "config.json").is_file():
            with suppress(OutriderError):
                dtype = args.dtype or default_dtype(args.device)
                self._know_model(meter, path, args.device, dtype)

    def _know_model(self, meter: CellMeter, model: Path, device: str, dtype: str) -> None:
        """Set the baseline, and the time in which the device reads the weights once, if the device
        is a CUDA device."""
        import torch

        read = weight_bytes(load_model_config(model), getattr(torch, dtype))
        gpu = describe().get("gpu")
        if device == CUDA and gpu is not None:
            meter.lab = read_baseline(str(gpu), read)
            meter.about["floor_ms"] = round(read / DEVICE_COPY_BYTES_S * 1000.0, 4)

    def _measure_router(self, meter: CellMeter) -> None:
        """Measure plain decoding and then the drafts with the services behind a running router."""
        fleet = connect_router(self._args.router)
        placement = self._args.placement or placement_of(fleet.info)
        parse_list(placement, PLACEMENTS, "--placement")
        model = fleet.info.verifiers[0].model if fleet.info.verifiers else self._args.model
        busy_cores = self._args.busy_polling_cores or 0
        self._know_served(meter, model)
        plain = BenchService(
            placement=PLAIN, drafts=(DraftSetting(),), busy_polling_cores=busy_cores
        )
        drafts = drafts_at(placement, self._drafts)
        drafted = BenchService(placement=placement, drafts=drafts, busy_polling_cores=busy_cores)
        for name in placements_of((placement,), self._args.in_turn):
            service = plain if name == PLAIN else drafted
            exchanges = self._args.device_exchange == ON
            cells = list(self._cells(service, model, fleet, exchanges=exchanges))
            self._measure_cells(meter, nullcontext(fleet), cells)

    def _measure_service(
        self, meter: CellMeter, machine: ServiceMachine, service: BenchService
    ) -> None:
        exchanges = machine.exchanges_on_device
        cells = list(self._cells(service, machine.name, exchanges=exchanges))
        if service.placement == PLAIN:
            cells = [cell for cell in cells if plain_key(cell.described()) not in self._kept_plain]
        if cells:
            self._measure_cells(meter, start_service(machine, service), cells)

    def _cells(
        self,
        service: BenchService,
        model: str,
        fleet: RunningFleet | None = None,
        *,
        exchanges: bool,
    ) -> Iterator[BenchCell]:
        """Yield the cells of a service, by ascending load.

        Cells of plain decoding that differ only in the acceptance rule are yielded once. If `fleet`
        is given, it is running, and its numbers of verifiers and drafters are used. `exchanges`
        states whether separate drafters use the device exchange.
        """
        verifiers = self._args.verifiers
        drafters = self._args.drafters if service.has_drafters else 0
        if fleet is not None:
            verifiers, drafters = len(fleet.info.verifiers), len(fleet.info.drafters)
        loads: list[tuple[int | None, float | None]]
        loads = [(count, None) for count in self._sessions]
        if self._args.rate is not None:
            loads = [(None, self._args.rate)]
        seen: set[BenchCell] = set()
        for sampling in self._samplings:
            for drafts in service.drafts:
                for sessions, rate in loads:
                    cell = BenchCell(
                        model=model,
                        placement=service.placement,
                        drafts=drafts,
                        sampling=sampling,
                        sessions=sessions,
                        rate=rate,
                        max_tokens=self._max_tokens,
                        busy_polling_cores=service.busy_polling_cores,
                        handicap=service.handicap,
                        planner=self._args.planner,
                        verifiers=verifiers,
                        drafters=drafters,
                        routers=self._args.routers,
                        prefix_cache=not self._args.no_prefix_cache,
                        device_exchange=exchanges and service.placement == SEPARATE,
                        batch_invariant=self._args.batch_invariant,
                    )
                    if service.placement == PLAIN:
                        cell = cell.plain
                    if cell not in seen:
                        yield cell
                    seen.add(cell)

    def _measure_cells(
        self,
        meter: CellMeter,
        services: AbstractContextManager[RunningFleet],
        cells: list[BenchCell],
    ) -> None:
        left = list(cells)
        self._budget.expect("start", START_S)
        if not self._budget.allows("start"):
            self._leave_out(left, "no time")
            return
        began = time.monotonic()
        try:
            with services as fleet:
                meter.start_s = time.monotonic() - began
                self._budget.expect("start", meter.start_s)
                while left:
                    self._measure_cell(meter, fleet, left[0])
                    left.pop(0)
        except OutriderError as error:
            self.failed.append(f"{cells[0].placement}: {error.message}")
            self._leave_out(left, error.code)

    def _measure_cell(self, meter: CellMeter, fleet: RunningFleet, cell: BenchCell) -> None:
        # A cell without drafts takes longest; what it took bounds those that speculate.
        kind = (cell.sessions, cell.rate)
        if not cell.sampling.is_supported:
            self._leave_out([cell], "unknown to this SDK")
            return
        if not self._budget.allows(kind):
            self._leave_out([cell], "no time")
            return
        began = time.monotonic()
        try:
            facts = meter.cell(fleet, cell)
        except OutriderError as error:
            self.failed.append(f"{cell}: {error.message}")
            self._leave_out([cell], error.code)
            return
        self._budget.expect(kind, time.monotonic() - began)
        self._content = results.merge(self._content, {**self._about, "cells": [facts]})
        print_progress(
            f"{cell}: {facts['tokens_per_s']} tokens/s, steady {facts['steady_tokens_per_s']}, "
            f"{results.over_plain(facts)} of plain"
            f"{named_steady(facts)}, {facts['emitted_per_round']} a round, "
            f"hit rate {facts['hit_rate']}, "
            f"first wave {facts['first_wave_ratio']}"
        )
        if facts["failed"]:
            self.failed.append(f"{cell}: {facts['failed']}")
        if self._args.out is not None:
            results.write(self._args.out, self._merged())

    def _leave_out(self, cells: list[BenchCell], why: str) -> None:
        for cell in cells:
            print_progress(f"left out ({why}): {cell}")
            self._left_out.append({**cell.described(), "why": why})

    def _merged(self) -> dict[str, Any]:
        return results.merge(
            self._content, {**self._about, "cells": [], results.LEFT_OUT: self._left_out}
        )


def placements_of(wanted: Sequence[str], in_turn: bool) -> list[str]:
    """Return the placements to measure, plain decoding first.

    Plain decoding is always included, because the other placements are compared with it. It is left
    out only if `in_turn` is set, because plain waves then alternate with the waves of the others.
    """
    return [name for name in PLACEMENTS if name in wanted or (name == PLAIN and not in_turn)]


def parse_sessions(text: str) -> tuple[int, ...]:
    """Return the numbers of sessions that `text` lists, in ascending order. Raises
    InvalidRequestError for anything but positive integers."""
    try:
        numbers = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        numbers = ()
    if not numbers or numbers[0] < 1:
        raise InvalidRequestError(
            f"--sessions: {text!r} must be numbers from 1 on", reason="INVALID_FLAG"
        )
    return numbers


def drafts_of(args: argparse.Namespace) -> tuple[DraftSetting, ...]:
    """Return the draft settings that --drafts lists or, without it, the one that --drafter,
    --draft-tokens and --draft-top-k describe.

    Each is combined with every listed value of --look-ahead, unless its name contains one.
    """
    names = args.drafts or (GRID_DRAFTS if args.grid and args.draft_tokens is None else None)
    method = DraftMethod(args.drafter)
    drafts = [DraftSetting(method=method, tokens=args.draft_tokens, top_k=args.draft_top_k)]
    if names is not None:
        drafts = [parse_drafts(name.strip()) for name in names.split(",")]
    if args.look_ahead is None and args.fan_out is None:
        return tuple(drafts)
    wanted = parse_list(args.look_ahead or "auto", LOOK_AHEAD, "--look-ahead")
    return tuple(ahead for draft in drafts for ahead in _aheads(draft, wanted, args.fan_out))


def _aheads(
    draft: DraftSetting, wanted: tuple[str, ...], fan_out: int | None
) -> Iterator[DraftSetting]:
    if draft.look_ahead is not None or draft.method is DraftMethod.NONE:
        yield draft
        return
    for value in map(LOOK_AHEAD.__getitem__, wanted):
        yield replace(draft, look_ahead=value, fan_out=None if value == 0 else fan_out)


def handicaps_of(args: argparse.Namespace) -> tuple[DrafterHandicap, ...]:
    """Return the artificial delays and slowdowns of drafters to measure, in ascending order. Raises
    InvalidRequestError for invalid numbers."""
    delays = _numbers(args.exchange_delay_ms or "0", "--exchange-delay-ms", low=0.0)
    factors = _numbers(args.drafter_slowdown or "1", "--drafter-slowdown", low=1.0)
    return tuple(
        DrafterHandicap(exchange_delay_ms=delay, drafter_slowdown=factor)
        for factor in factors
        for delay in delays
    )


def _numbers(text: str, what: str, *, low: float) -> tuple[float, ...]:
    try:
        numbers = tuple(sorted({float(part) for part in text.split(",")}))
    except ValueError:
        numbers = ()
    if not numbers or not all(low <= number < math.inf for number in numbers):
        raise InvalidRequestError(
            f"{what}: {text!r} must be numbers from {low:g} on", reason="INVALID_FLAG"
        )
    return numbers


def samplings_of(args: argparse.Namespace) -> tuple[SamplingSetting, ...]:
    """Return the sampling settings that --sampling lists or, without it, those of the grid's
    temperatures or the one that other flags describe."""
    if args.sampling:
        names = parse_list(args.sampling, SETS, "--sampling")
        return tuple(replace(SETS[name], ignore_eos=args.ignore_eos) for name in names)
    said = _numbers(args.temperature or "0", "--temperature", low=0.0)
    temperatures = GRID_TEMPERATURES if args.grid and args.temperature is None else said
    return tuple(
        SamplingSetting(
            temperature=temperature,
            rule=args.rule,
            top_p=args.top_p,
            min_p=args.min_p,
            repetition_penalty=args.repetition_penalty,
            ignore_eos=args.ignore_eos,
        )
        for temperature in temperatures
    )


def _check_files(files: ModelFiles, drafts: tuple[DraftSetting, ...]) -> None:
    if files.head is None and any(draft.method is DraftMethod.EAGLE3 for draft in drafts):
        raise InvalidRequestError(f"no head ships for {files.name}: give --head DIR or --drafts")


def named_steady(facts: dict[str, Any]) -> str:
    """Return the ratio of steady tokens/s to those of the plain waves that alternated with the
    cell's waves, as text for the progress line; "" if there is no ratio."""
    found = facts.get("steady_over_plain_in_turn")
    return "" if found is None else f" (steady {found})"
