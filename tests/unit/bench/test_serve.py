"""`outrider bench serve` without services: waves, cells, loads, the lab's rounds, service.json."""

from __future__ import annotations

import argparse
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from outrider_bench.prompts import BenchPrompt
from outrider_bench.serve import cli, results, run
from outrider_bench.serve.cells import (
    PLAIN,
    SETS,
    BenchCell,
    DrafterHandicap,
    DraftSetting,
    SamplingSetting,
    cell_key,
    lock_step_key,
    parse_drafts,
    plain_key,
)
from outrider_bench.serve.chart import chart_lines, chart_title, draw_chart
from outrider_bench.serve.fleet import (
    BenchService,
    ServiceMachine,
    drafter_hooks,
    local_config,
    plan_services,
    verifier_hooks,
)
from outrider_bench.serve.measurement import (
    TimeBudget,
    compare_in_turn,
    describe_cell,
    throughput_ratio,
)
from outrider_bench.serve.round_baseline import (
    FORWARD,
    BaselineRound,
    RoundBaseline,
    efficiency,
    read_baseline,
)
from outrider_bench.serve.run import (
    drafts_of,
    handicaps_of,
    parse_sessions,
    placements_of,
    samplings_of,
)
from outrider_bench.serve.wave_metrics import RequestWave, WaveAnswer
from outrider_bench.serve.workload import WaveSize, arrivals, make_load, split_sessions
from outrider_drafter.hooks import DrafterHooks
from outrider_verifier.hooks import VerifierHooks

from outrider.client.local.model_files import ModelFiles
from outrider.config.hooks import install_hooks
from outrider.errors import InvalidRequestError
from outrider.spec.plan import DraftMethod

CHAIN = DraftSetting(method=DraftMethod.EAGLE3, tokens=3)
CELL = BenchCell(model="m", placement="fused", drafts=CHAIN, sampling=SamplingSetting(), sessions=2)


def answer(opened: float, first: float, last: float, rounds: int = 4, size: int = 2) -> WaveAnswer:
    """Messages at even times from `first` to `last`: one token, then `size` for each round."""
    step = (last - first) / rounds
    later = tuple((first + step * (i + 1), size) for i in range(rounds))
    return WaveAnswer(
        due=opened,
        opened=opened,
        arrivals=((first, 1), *later),
        rounds=rounds,
        emitted=rounds * size,
        proposed=rounds * 3,
    )


def described(cell: BenchCell = CELL, **figures: Any) -> dict[str, Any]:
    """A cell of the file with these figures."""
    usual = {"tokens_per_s": 100.0, "steady_tokens_per_s": 110.0, "round_ms": 5.0}
    return {**cell.described(), **usual, "over_plain": None, **figures}


class TestWave:
    def test_a_closed_loop_is_steady_from_full_to_the_last_start(self) -> None:
        answers = (answer(0, 1, 5), answer(0, 2, 10), answer(5, 6, 14), answer(10, 11, 15))
        assert RequestWave(answers, 2).steady == (2, 10)

    def test_without_refills_it_is_steady_until_one_ends(self) -> None:
        assert RequestWave((answer(0, 1, 5), answer(0, 2, 10)), 2).steady == (2, 5)

    def test_an_open_loop_is_steady_once_a_fifth_has_arrived(self) -> None:
        answers = tuple(answer(at, at + 1, at + 3) for at in range(10))
        assert RequestWave(answers, None).steady == (2, 9)

    def test_there_is_no_steady_state_where_too_few_answered(self) -> None:
        failed = WaveAnswer(due=0, opened=0, code="UNAVAILABLE")
        wave = RequestWave((answer(0, 1, 5), failed), 2)
        assert wave.steady is None
        assert wave.steady_tokens_per_s is None
        assert wave.figures()["failed"] == {"UNAVAILABLE": 1}

    def test_a_window_that_ends_before_it_begins_is_none(self) -> None:
        assert RequestWave((answer(0, 1, 2), answer(0, 3, 4)), 2).steady is None

    def test_steady_tokens_are_those_within_the_window(self) -> None:
        # The window is (1, 5]: two rounds of the first, all four of the second at 2, 3, 4, 5.
        wave = RequestWave((answer(0, 0, 8), answer(0, 1, 5)), 2)
        assert wave.steady == (1, 5)
        assert wave.steady_tokens_per_s == pytest.approx((2 * 2 + 4 * 2) / 4)

    def test_figures_are_those_of_the_readers(self) -> None:
        late = replace(answer(0.5, 1, 5), due=0.0)
        figures = RequestWave((late, answer(0, 3, 7)), 2).figures()
        assert figures["tokens"] == 18
        assert figures["tokens_per_s"] == pytest.approx(18 / 7, abs=0.01)
        assert figures["emitted_per_round"] == 2.0
        assert figures["proposed_per_round"] == 3.0
        assert figures["round_ms"] == 1000.0
        assert figures["itl_ms"] == {"p50": 1000.0, "p90": 1000.0, "p95": 1000.0, "p99": 1000.0}
        assert figures["per_token_ms"] == {"p50": 500.0, "p90": 500.0, "p95": 500.0, "p99": 500.0}
        # From when it was due, not from when a late client sent it.
        assert figures["ttft_ms"] == {"p50": 2000.0, "p90": 2800.0, "p95": 2900.0, "p99": 2980.0}

    def test_rounds_that_looked_ahead_are_a_share_of_all_and_hits_one_of_them(self) -> None:
        ahead = replace(answer(0, 1, 5), look_ahead_rounds=2, hit_rounds=1)
        figures = RequestWave((ahead, answer(0, 1, 5)), 2).figures()
        assert (figures["look_ahead_share"], figures["hit_rate"]) == (0.25, 0.5)

    def test_a_wave_without_tokens_has_no_figures(self) -> None:
        figures = RequestWave((WaveAnswer(due=0, opened=0, code="INTERNAL"),), 1).figures()
        assert figures["tokens_per_s"] is None
        assert figures["requests_per_s"] is None
        assert figures["ttft_ms"] == {}


class TestCells:
    @pytest.mark.parametrize(
        "name",
        [
            *("none", "auto", "ngram", "chain-3", "tree-32", "model", "model-4"),
            *("chain-3+ahead", "tree-32+ahead16", "auto+lockstep", "ngram+ahead"),
        ],
    )
    def test_names_of_drafts_are_read_back(self, name: str) -> None:
        assert parse_drafts(name).name == name

    def test_a_tree_may_say_its_children(self) -> None:
        assert parse_drafts("tree-32").top_k == 8
        assert parse_drafts("tree-32x4").top_k == 4

    def test_a_name_may_say_how_far_ahead(self) -> None:
        ahead, lock_step = parse_drafts("chain-3+ahead16"), parse_drafts("chain-3+lockstep")
        assert (ahead.look_ahead, ahead.fan_out) == (1, 16)
        assert ahead.options() == {**CHAIN.options(), "look_ahead": 1, "fan_out": 16}
        assert lock_step.options() == {**CHAIN.options(), "look_ahead": 0}
        assert parse_drafts("chain-3").options() == CHAIN.options()

    @pytest.mark.parametrize(
        "name",
        [
            *("", "chain", "chain-0", "tree-x", "chain-3,", "eagle3-4"),
            *("none+ahead", "chain-3+", "chain-3+lockstep4", "chain-3+ahead+lockstep", "+ahead"),
        ],
    )
    def test_other_names_are_refused(self, name: str) -> None:
        with pytest.raises(InvalidRequestError):
            parse_drafts(name)

    def test_all_that_a_cell_depends_on_is_in_its_key(self) -> None:
        others = [
            replace(CELL, model="n"),
            replace(CELL, placement="separate"),
            replace(CELL, drafts=replace(CHAIN, tokens=5)),
            replace(CELL, drafts=replace(CHAIN, top_k=4)),
            *(replace(CELL, sampling=sampling) for sampling in list(SETS.values())[1:]),
            replace(CELL, sessions=8),
            replace(CELL, sessions=None, rate=4.0),
            replace(CELL, max_tokens=64),
            replace(CELL, busy_polling_cores=3),
            replace(CELL, drafts=replace(CHAIN, look_ahead=0)),
            replace(CELL, drafts=replace(CHAIN, look_ahead=1)),
            replace(CELL, drafts=replace(CHAIN, look_ahead=1, fan_out=8)),
            replace(CELL, drafts=replace(CHAIN, fan_out=8)),
            replace(CELL, handicap=DrafterHandicap(exchange_delay_ms=0.5)),
            replace(CELL, handicap=DrafterHandicap(drafter_slowdown=2.0)),
        ]
        keys = {cell_key(cell.described()) for cell in (CELL, *others)}
        assert len(keys) == 1 + len(others)

    def test_lock_step_is_what_a_cell_ahead_is_compared_with_all_else_alike(self) -> None:
        lock_step = replace(CELL, drafts=replace(CHAIN, look_ahead=0))
        ahead = replace(CELL, drafts=replace(CHAIN, look_ahead=1, fan_out=8))
        far = replace(ahead, handicap=DrafterHandicap(exchange_delay_ms=1.0))
        assert lock_step_key(ahead.described()) == lock_step_key(lock_step.described())
        assert lock_step_key(far.described()) != lock_step_key(lock_step.described())
        assert plain_key(far.described()) == plain_key(lock_step.described())

    def test_plain_decoding_is_alike_under_every_rule(self) -> None:
        rejection = replace(CELL, sampling=SETS["rejection"])
        plain = replace(CELL, placement="plain", drafts=DraftSetting(), sampling=SETS["sampled"])
        assert plain_key(rejection.described()) == plain_key(plain.described())
        assert plain_key(CELL.described()) != plain_key(plain.described())

    def test_only_what_differs_from_the_default_is_asked_for(self) -> None:
        assert SamplingSetting().options() == {"temperature": 0.0}
        assert SETS["top_p"].options() == {"temperature": 0.8, "rule": "coupled", "top_p": 0.9}
        assert DraftSetting().options() == {"speculate": False}
        assert CHAIN.options() == {"drafter": "eagle3", "draft_tokens": 3, "draft_top_k": 1}


class TestLoads:
    def test_waves_grow_with_the_sessions(self) -> None:
        prompts = [BenchPrompt(task="t", text=str(i)) for i in range(3)]
        load = make_load(replace(CELL, sessions=8), prompts, WaveSize())
        assert len(load) == 32
        assert [ask.text for ask in load[:4]] == ["0", "1", "2", "0"]
        assert len({ask.options["seed"] for ask in load}) == 32
        assert {ask.after_s for ask in load} == {0.0}
        assert len(make_load(replace(CELL, sessions=1), prompts, WaveSize())) == 16

    def test_arrivals_are_those_of_a_poisson_process(self) -> None:
        times = arrivals(4000, 50.0)
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        mean = sum(gaps) / len(gaps)
        deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
        assert times[0] == 0.0
        assert mean == pytest.approx(0.02, rel=0.06)
        assert deviation == pytest.approx(mean, rel=0.08)
        assert times == arrivals(4000, 50.0)

    @pytest.mark.parametrize(("sessions", "processes"), [(1, 8), (8, 3), (64, 8)])
    def test_shares_add_up_and_differ_by_one_at_most(self, sessions: int, processes: int) -> None:
        found = split_sessions(sessions, processes)
        assert sum(found) == sessions
        assert max(found) - min(found) <= 1


class TestServices:
    def test_plain_comes_first_and_each_own_chain_has_a_start(self) -> None:
        chains = (CHAIN, replace(CHAIN, tokens=5))
        ngram = parse_drafts("ngram")
        services = plan_services(("plain", "separate", "fused"), (*chains, ngram), {"separate": 3})
        assert services == [
            BenchService(placement="plain", drafts=(DraftSetting(),)),
            BenchService(placement="separate", drafts=(*chains, ngram), busy_polling_cores=3),
            BenchService(placement="fused", drafts=(chains[0], ngram)),
            BenchService(placement="fused", drafts=(chains[1],)),
        ]

    def test_each_handicap_of_a_separate_drafter_has_a_start(self) -> None:
        ahead = (parse_drafts("chain-3+lockstep"), parse_drafts("chain-3+ahead"))
        slow = DrafterHandicap(exchange_delay_ms=1.0)
        services = plan_services(
            ("plain", "separate", "fused"), ahead, {}, (DrafterHandicap(), slow)
        )
        assert services == [
            BenchService(placement="plain", drafts=(DraftSetting(),)),
            BenchService(placement="separate", drafts=ahead),
            BenchService(placement="separate", drafts=ahead, handicap=slow),
            BenchService(placement="fused", drafts=(CHAIN,)),
        ]

    def test_handicaps_and_emulated_rounds_are_hooks_of_the_processes(self) -> None:
        assert drafter_hooks(DrafterHandicap()) == ()
        slow = DrafterHandicap(exchange_delay_ms=0.5, drafter_slowdown=3.0)
        hooks = drafter_hooks(slow)
        assert install_hooks(hooks, DrafterHooks()).handicap == (
            "exchange held by 0.5 ms each way, drafts 3x as slow"
        )
        files = ModelFiles(path=Path("m"), name="m", head=None)
        machine = ServiceMachine(files=files, device="cpu")
        assert verifier_hooks(machine) == ()
        emulated = replace(machine, round_ms=4.05, row_us=22.0)
        assert install_hooks(verifier_hooks(emulated), VerifierHooks()).round_throttle is not None
        service = BenchService(placement="separate", drafts=(CHAIN,), handicap=slow)
        config = local_config(emulated, replace(service, drafts=(parse_drafts("ngram"),)))
        assert config.drafter_hooks == hooks
        assert config.verifier_hooks == verifier_hooks(emulated)

    def test_drafters_are_counted_where_one_is_started(self) -> None:
        ngram, auto = parse_drafts("ngram"), parse_drafts("auto")
        assert not BenchService(placement="plain", drafts=(DraftSetting(),)).has_drafters
        assert BenchService(placement="separate", drafts=(CHAIN,)).has_drafters
        assert not BenchService(placement="fused", drafts=(CHAIN, auto)).has_drafters
        assert BenchService(placement="fused", drafts=(CHAIN, ngram)).has_drafters

    def test_cells_of_different_fleets_and_planners_are_kept_apart(self) -> None:
        fixed, larger = replace(CELL, planner="fixed"), replace(CELL, verifiers=3, drafters=1)
        described = [each.described() for each in (CELL, fixed, larger)]
        assert len({cell_key(each) for each in described}) == 3
        assert plain_key(described[0]) == plain_key(described[1]) != plain_key(described[2])

    def test_a_budget_lets_begin_what_will_end_in_time(self) -> None:
        now = [0.0]
        budget = TimeBudget(10.0, lambda: now[0])
        assert budget.allows("cell")
        budget.expect("cell", 6.0)
        now[0] = 3.0
        assert budget.allows("cell")
        now[0] = 5.0
        assert not budget.allows("cell")
        assert TimeBudget().allows("cell")


class TestLab:
    LAB = RoundBaseline(
        {("plain", 0): {1: 4.0, 8: 4.7}, ("colocated", 3): {8: 5.0}, ("colocated", 5): {8: 6.0}}
    )

    def test_rounds_between_measured_ones_lie_on_a_line(self) -> None:
        plain = replace(CELL, placement="plain", drafts=DraftSetting(), sessions=4)
        found = self.LAB.round_of(plain)
        assert found is not None
        assert found.ms == pytest.approx(4.3)
        four = replace(CELL, placement="separate", drafts=replace(CHAIN, tokens=4), sessions=8)
        found = self.LAB.round_of(four)
        assert found is not None
        assert found.ms == pytest.approx(5.5)
        assert found.source == "rounds.json, colocated"

    def test_nothing_is_made_up_outside(self) -> None:
        assert self.LAB.round_of(replace(CELL, placement="colocated", sessions=64)) is None
        assert self.LAB.round_of(replace(CELL, drafts=parse_drafts("tree-32"))) is None
        assert self.LAB.round_of(replace(CELL, sessions=None, rate=1.0)) is None

    def test_the_results_of_this_checkout_are_read(self) -> None:
        lab = read_baseline("NVIDIA H200", 14_361_829_376)
        found = lab.round_of(replace(CELL, sessions=32))
        assert found is not None
        assert found.ms == lab.rounds[("fused", 3)][32]
        assert not read_baseline("NVIDIA H100 80GB HBM3", 14_361_829_376).rounds
        assert not read_baseline("NVIDIA H200", 269_000_000).rounds

    def test_they_are_known_for_what_a_running_router_serves(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shape = {
            "model_type": "llama",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "tie_word_embeddings": False,
        }
        (tmp_path / "config.json").write_text(json.dumps(shape))
        monkeypatch.setattr(run, "describe", lambda: {"gpu": "NVIDIA H200"})
        parser = argparse.ArgumentParser()
        cli.add_arguments(parser)
        flags = ["--router", "127.0.0.1:1", "--device", "cuda", "--model"]
        meter = SimpleNamespace(lab=RoundBaseline(), about={})
        run.BenchRun(parser.parse_args([*flags, "smollm2-135m"]), {})._know_served(meter, "no-such")
        assert not meter.lab.rounds
        # The devices of another host are not known.
        there = parser.parse_args([*flags, str(tmp_path), "--router", "elsewhere:1"])
        run.BenchRun(there, {})._know_served(meter, "no-such")
        assert not meter.lab.rounds
        run.BenchRun(parser.parse_args([*flags, str(tmp_path)]), {})._know_served(meter, "no-such")
        assert meter.lab.round_of(replace(CELL, placement="separate", sessions=8)) is not None

    def test_efficiency_is_the_share_of_the_labs_tokens(self) -> None:
        # Two sessions, three tokens a round of 5 ms: 1,200 tokens/s at best.
        assert efficiency(600.0, 2, 3.0, 5.0) == pytest.approx(0.5)
        assert efficiency(600.0, None, 3.0, 5.0) is None
        assert efficiency(None, 2, 3.0, 5.0) is None


class TestDescribe:
    def test_the_last_wave_counts_and_the_first_is_set_against_it(self) -> None:
        slow = RequestWave((answer(0, 2, 10), answer(0, 2, 10)), 2)
        fast = RequestWave((answer(0, 1, 5), answer(0, 1, 5)), 2)
        facts = describe_cell(CELL, [slow, fast, fast], BaselineRound(1000.0, "plain.json"), 900.0)
        assert facts["first_wave_ratio"] == 0.5
        assert facts["waves_tokens_per_s"] == [1.8, 3.6, 3.6]
        assert facts["tokens_per_s"] == 3.6
        # Two sessions, two tokens a round of 1 s, and the wave reaches just that.
        assert facts["efficiency"] == 1.0
        assert facts["lab_source"] == "plain.json"
        assert describe_cell(CELL, [fast], None, None)["first_wave_ratio"] is None

    def test_the_verifiers_own_figure_stands_for_a_lab_at_one_session_alone(self) -> None:
        wave = RequestWave((answer(0, 1, 5), answer(1, 2, 5)), 1)
        alone = describe_cell(replace(CELL, sessions=1), [wave], None, 1000.0)
        assert (alone["lab_source"], alone["lab_round_ms"]) == (FORWARD, 1000.0)
        among = describe_cell(replace(CELL, sessions=2), [wave], None, 1000.0)
        assert among["lab_source"] is among["lab_round_ms"] is None
        assert among["forward_ms"] == 1000.0

    def test_steady_figures_are_compared_where_both_have_them(self) -> None:
        plain = {"tokens_per_s": 50.0, "steady_tokens_per_s": 55.0}
        assert throughput_ratio(described(), plain) == 2.0
        assert throughput_ratio(described(steady_tokens_per_s=None), plain) == 2.0
        assert throughput_ratio(described(), None) is None


class TestInTurn:
    def test_pairs_of_waves_are_compared_but_for_the_first(self) -> None:
        def wave(seconds: float) -> RequestWave:
            return RequestWave((answer(0.0, 0.1, seconds),), 1)

        waves, plain = [wave(1.0), wave(2.0), wave(4.0)], [wave(4.0), wave(3.0), wave(4.0)]
        found = compare_in_turn(waves, plain)
        assert found["over_plain_in_turn"] == pytest.approx(1.25)
        assert len(found["plain_waves_tokens_per_s"]) == 3
        last = plain[-1].figures()
        assert found["plain_in_turn"]["ttft_ms"] == last["ttft_ms"]
        assert found["plain_in_turn"]["round_ms"] == last["round_ms"]
        assert compare_in_turn(waves[:1], plain[:1])["over_plain_in_turn"] == pytest.approx(4.0)
        assert compare_in_turn(waves, []) == {}

    def test_steady_parts_of_pairs_are_compared_too(self) -> None:
        def wave(tail_s: float) -> RequestWave:
            return RequestWave(
                (answer(0, 0.1, 1), answer(0, 0.1, 2), answer(1, 1.1, 2 + tail_s)), 2
            )

        found = compare_in_turn([wave(1.0), wave(4.0)], [wave(1.0), wave(2.0)])
        assert found["over_plain_in_turn"] < 0.7
        assert found["steady_over_plain_in_turn"] == pytest.approx(1.0)

    def test_plain_requests_differ_in_their_drafts_alone(self) -> None:
        plain = CELL.plain
        assert plain.placement == PLAIN and plain.drafts.options() == {"speculate": False}
        assert (
            replace(plain, placement=CELL.placement, drafts=CELL.drafts, sampling=CELL.sampling)
            == CELL
        )


class TestResults:
    def test_a_later_cell_replaces_the_one_of_its_key(self) -> None:
        other = described(replace(CELL, sessions=8))
        old = {"commit": "a", "date": "1", "cells": [described(), other]}
        new = {"commit": "a", "date": "2", "cells": [described(tokens_per_s=200.0)]}
        merged = results.merge(old, new)
        assert [cell["tokens_per_s"] for cell in merged["cells"]] == [200.0, 100.0]
        assert merged["date"] == "2"
        assert set(merged) == {*results.ABOUT, "cells", *results.OTHERS, results.FLOOR}

    def test_parts_of_other_benchmarks_join_key_by_key(self) -> None:
        old = {"commit": "a", "cells": [], "exchange_us": {"1": 390.0, "64": 900.0}}
        merged = results.merge(old, {"exchange_us": {"1": 380.0}, "events_per_s": 41000})
        assert merged["exchange_us"] == {"1": 380.0, "64": 900.0}
        assert merged["events_per_s"] == 41000
        assert merged["commit"] == "a"

    def test_two_commits_and_foreign_files_are_refused(self) -> None:
        with pytest.raises(InvalidRequestError, match="two commits"):
            results.merge({"commit": "a", "cells": []}, {"commit": "b", "cells": []})
        with pytest.raises(InvalidRequestError, match=r"nothing of service\.json"):
            results.merge({}, {"commit": "a", "figures": {}})

    def test_files_are_merged_and_a_new_commit_begins_anew(self, tmp_path: Path) -> None:
        out, part = tmp_path / "service.json", tmp_path / "part.json"
        part.write_text(json.dumps({"commit": "a", "cells": [described()]}))
        assert results.merge_files(out, [part]) == results.read(out)
        assert results.read(out, "a")["cells"] == [described()]
        assert results.read(out, "b") == {}
        with pytest.raises(InvalidRequestError, match="no such file"):
            results.merge_files(out, [tmp_path / "absent.json"])

    def test_what_was_left_out_stays_said_until_it_is_measured(self) -> None:
        other = replace(CELL, sessions=8).described()
        old = {"cells": [], "left_out": [CELL.described(), other]}
        assert results.merge(old, {"cells": [described()]})["left_out"] == [other]

    def test_the_floor_is_the_worst_cell_that_speculates(self) -> None:
        plain = replace(CELL, placement="plain", drafts=DraftSetting())
        cells = [
            described(plain, over_plain=1.0),
            described(over_plain=1.4),
            described(replace(CELL, sessions=8), over_plain=1.1),
            described(replace(CELL, sessions=64)),
            described(replace(CELL, sessions=None, rate=2.0), over_plain=0.9),
            described(replace(CELL, planner="fixed"), over_plain=0.8),
        ]
        assert results.floor_ratio(cells) == 1.1
        assert results.floor_ratio(cells[:1]) is None

    def test_waves_in_turn_say_more_than_a_service_of_its_own(self) -> None:
        cell = described(over_plain=1.4) | {"over_plain_in_turn": 0.98}
        assert results.over_plain(cell) == results.floor_ratio([cell]) == 0.98
        assert results.over_plain(described(over_plain=None)) is None

    def test_the_cost_of_a_round_is_the_worst_at_equal_sessions(self) -> None:
        def cells(sessions: int, **costs: float) -> list[dict[str, Any]]:
            at = replace(CELL, sessions=sessions)
            return [
                described(replace(at, sampling=SETS[name]), round_ms=ms)
                for name, ms in costs.items()
            ]

        found = results.round_cost(
            [
                *cells(1, greedy=5.0, top_p=5.1, penalties=5.5, rejection=5.0),
                *cells(8, greedy=5.0, top_p=5.3, bias=5.05, sampled=9.0),
                *cells(32, rejection=9.0),
                *cells(64, greedy=5.0, top_p=10.0),
            ]
        )
        assert found == {"top_p": 1.06, "penalties": 1.1, "rejection": 1.0, "bias": 1.01}


class TestPicture:
    def test_each_placement_has_a_line_and_plain_is_dashed(self) -> None:
        plain = replace(CELL, placement="plain", drafts=DraftSetting())
        cells = [
            described(replace(cell, sessions=sessions), tokens_per_s=100.0 * sessions)
            for cell in (CELL, plain)
            for sessions in (1, 8)
        ]
        cells.append(described(replace(plain, sampling=SETS["top_p"])))
        found = chart_lines(cells)
        assert found == {
            "plain": [(1, 100.0), (8, 800.0)],
            "fused, chain-3": [(1, 100.0), (8, 800.0)],
        }
        picture = draw_chart(found, chart_title(cells))
        assert picture.count("stroke-dasharray") == 2
        assert "greedy, answers up to 256 tokens" in picture

    def test_nothing_cannot_be_drawn(self) -> None:
        with pytest.raises(InvalidRequestError):
            chart_lines([described(replace(CELL, sessions=None, rate=2.0))])


class TestFlags:
    def test_sessions_rise(self) -> None:
        assert parse_sessions("32,1,8") == (1, 8, 32)
        for text in ("", "0,1", "a"):
            with pytest.raises(InvalidRequestError):
                parse_sessions(text)

    def test_three_flags_or_a_list_say_the_drafts(self) -> None:
        args = argparse.Namespace(
            drafts=None,
            grid=False,
            drafter="eagle3",
            draft_tokens=32,
            draft_top_k=8,
            look_ahead=None,
            fan_out=None,
        )
        assert drafts_of(args) == (parse_drafts("tree-32"),)
        args.drafts = "chain-3, ngram"
        assert [drafts.name for drafts in drafts_of(args)] == ["chain-3", "ngram"]
        args.look_ahead, args.fan_out = "0,1", 12
        args.drafts = "none, chain-3, tree-8+ahead4"
        names = ["none", "chain-3+lockstep", "chain-3+ahead12", "tree-8+ahead4"]
        assert [drafts.name for drafts in drafts_of(args)] == names
        args.look_ahead = "2"
        with pytest.raises(InvalidRequestError, match="--look-ahead"):
            drafts_of(args)

    def test_handicaps_are_all_pairs_and_nothing_by_default(self) -> None:
        args = argparse.Namespace(exchange_delay_ms=None, drafter_slowdown=None)
        assert handicaps_of(args) == (DrafterHandicap(),)
        args.exchange_delay_ms, args.drafter_slowdown = "1,0,.1", "2"
        found = [(h.exchange_delay_ms, h.drafter_slowdown) for h in handicaps_of(args)]
        assert found == [(0.0, 2.0), (0.1, 2.0), (1.0, 2.0)]
        for delay, factor in (("-1", "1"), ("nan", "1"), ("0", ".5"), ("0", "inf"), ("0", "1,,2")):
            args.exchange_delay_ms, args.drafter_slowdown = delay, factor
            with pytest.raises(InvalidRequestError, match="must be numbers"):
                handicaps_of(args)

    def test_plain_decoding_is_measured_unless_it_has_waves_in_turn(self) -> None:
        assert placements_of(("fused", "separate"), False) == ["plain", "separate", "fused"]
        assert placements_of(("fused", "separate"), True) == ["separate", "fused"]
        assert placements_of(("plain",), True) == ["plain"]

    def test_a_grid_has_its_temperatures(self) -> None:
        args = argparse.Namespace(
            sampling=None,
            grid=True,
            temperature=None,
            rule="coupled",
            top_p=1.0,
            min_p=0.0,
            repetition_penalty=1.0,
            ignore_eos=False,
        )
        assert [sampling.temperature for sampling in samplings_of(args)] == [0, 0.7, 1, 1.5, 2]
        args.temperature = "1,2"
        assert [sampling.temperature for sampling in samplings_of(args)] == [1, 2]
        args.sampling = "greedy,rejection"
        assert samplings_of(args) == (SETS["greedy"], SETS["rejection"])
        args.ignore_eos = True
        assert [sampling.options()["ignore_eos"] for sampling in samplings_of(args)] == [True] * 2
