"""What a request's options mean."""

from __future__ import annotations

import pytest
from outrider_router.config import SpeculationDefaults
from outrider_router.requests.request import (
    make_plan,
    make_sampling,
    needs_no_drafter,
    output_budget,
    plan_for_verifier,
    stop_ids,
)

from outrider.errors import InvalidRequestError
from outrider.spec.plan import DraftMethod
from outrider.spec.sampling import Rule
from outrider.wire.inference import SamplingOptions, SpeculationOptions, StoppingOptions
from tests.fakes.verifier import FakeVerifier

DEFAULTS = SpeculationDefaults(max_draft_tokens=32)


def test_a_request_without_wishes_gets_the_defaults() -> None:
    plan = make_plan(SpeculationOptions(), DEFAULTS)
    assert (plan.method, plan.draft_tokens, plan.top_k) == (DraftMethod.EAGLE3, 4, 1)
    assert plan.proposal_timeout_ms == DEFAULTS.proposal_timeout_ms


def test_wishes_are_cut_to_the_routers_bound() -> None:
    plan = make_plan(SpeculationOptions(draft_tokens=200, draft_top_k=8), DEFAULTS)
    assert (plan.draft_tokens, plan.top_k) == (32, 8)


def test_drafting_ahead_is_allowed_unless_the_request_or_the_router_says_lock_step() -> None:
    def ahead(options: SpeculationOptions, defaults: SpeculationDefaults) -> tuple[int, int]:
        plan = make_plan(options, defaults)
        return plan.look_ahead, plan.fan_out

    lock_step = SpeculationDefaults(look_ahead=0, fan_out=12)
    assert ahead(SpeculationOptions(), DEFAULTS) == (1, 0)
    assert ahead(SpeculationOptions(look_ahead=0), DEFAULTS) == (0, 0)
    assert ahead(SpeculationOptions(), lock_step) == (0, 12)
    assert ahead(SpeculationOptions(look_ahead=1, fan_out=0), lock_step) == (1, 0)
    assert ahead(SpeculationOptions(enabled=False, look_ahead=1, fan_out=8), DEFAULTS) == (0, 0)


def test_an_ngram_miss_is_not_waited_for() -> None:
    plan = make_plan(SpeculationOptions(method=DraftMethod.NGRAM), DEFAULTS)
    assert plan.proposal_timeout_ms == DEFAULTS.ngram_proposal_timeout_ms


@pytest.mark.parametrize(
    "options",
    [
        SpeculationOptions(enabled=False, method=DraftMethod.EAGLE3),
        SpeculationOptions(method=DraftMethod.NONE),
        SpeculationOptions(draft_tokens=0),
    ],
)
def test_every_way_of_opting_out_is_plain_decoding(options: SpeculationOptions) -> None:
    assert not make_plan(options, DEFAULTS).is_speculative


@pytest.mark.parametrize(
    "options",
    [
        SpeculationOptions(draft_top_k=0),
        SpeculationOptions(draft_tokens=10**6),
        SpeculationOptions(look_ahead=2),
        SpeculationOptions(fan_out=65),
    ],
)
def test_impossible_wishes_are_refused(options: SpeculationOptions) -> None:
    with pytest.raises(InvalidRequestError):
        make_plan(options, DEFAULTS)


OWN = FakeVerifier.describe(in_process_methods=(DraftMethod.EAGLE3,), in_process_draft_length=3)


def test_a_verifier_that_drafts_itself_does_so_in_chains_of_its_own_length() -> None:
    wish = make_plan(SpeculationOptions(draft_tokens=20, draft_top_k=4, fan_out=8), DEFAULTS)
    plan = plan_for_verifier(wish, OWN)
    assert (wish.look_ahead, wish.fan_out, plan.look_ahead, plan.fan_out) == (1, 8, 0, 0)
    assert needs_no_drafter(plan, OWN)
    assert (plan.method, plan.draft_tokens, plan.top_k) == (DraftMethod.EAGLE3, 3, 1)


@pytest.mark.parametrize(
    "options",
    [SpeculationOptions(method=DraftMethod.NGRAM), SpeculationOptions(enabled=False)],
)
def test_other_plans_stay_as_they_are(options: SpeculationOptions) -> None:
    wish = make_plan(options, DEFAULTS)
    assert plan_for_verifier(wish, OWN) is wish
    assert not needs_no_drafter(wish, OWN)
    eagle3 = make_plan(SpeculationOptions(), DEFAULTS)
    assert plan_for_verifier(eagle3, FakeVerifier.describe()) is eagle3


def test_sampling_defaults_to_greedy_and_zero_is_a_seed() -> None:
    drawn = make_sampling(SamplingOptions(), seed=9, vocab_size=10)
    assert (drawn.effective_rule, drawn.seed) == (Rule.GREEDY, 9)
    given = make_sampling(
        SamplingOptions(temperature=1.0, seed=0, banned_token_ids=(3,)), seed=9, vocab_size=10
    )
    assert (given.effective_rule, given.seed, given.banned_ids) == (Rule.COUPLED, 0, (3,))


def test_a_logit_bias_reaches_the_session_and_must_name_ids_of_the_model() -> None:
    biased = SamplingOptions(logit_bias=((9, 1.5), (0, -100.0)))
    given = make_sampling(biased, seed=9, vocab_size=10)
    assert given.logit_bias == ((9, 1.5), (0, -100.0))
    with pytest.raises(InvalidRequestError, match="logit_bias contains 9"):
        make_sampling(biased, seed=9, vocab_size=9)
    with pytest.raises(InvalidRequestError, match="amounts of logit_bias"):
        make_sampling(SamplingOptions(logit_bias=((0, 101.0),)), seed=9, vocab_size=9)


def test_stop_ids_are_the_models_then_the_requests_without_repetition() -> None:
    options = StoppingOptions(stop_token_ids=(5, 2))
    assert stop_ids(options, (2, 3), 10) == (2, 3, 5)
    assert stop_ids(StoppingOptions(ignore_eos=True, stop_token_ids=(5,)), (2, 3), 10) == (5,)
    with pytest.raises(InvalidRequestError):
        stop_ids(StoppingOptions(stop_token_ids=(10,)), (), 10)


def budget(prompt_len: int, **options: int) -> int:
    return output_budget(
        StoppingOptions(**options),  # type: ignore[arg-type]
        prompt_len=prompt_len,
        max_context_len=100,
        default_max_tokens=64,
    )


def test_the_default_length_is_cut_to_the_context_and_an_explicit_one_is_not() -> None:
    assert budget(10) == 64
    assert budget(90) == 10
    assert budget(90, max_tokens=10) == 10
    with pytest.raises(InvalidRequestError, match="leaves 10"):
        budget(90, max_tokens=11)


def test_min_tokens_raises_the_default_and_may_not_exceed_an_explicit_maximum() -> None:
    assert budget(10, min_tokens=80) == 80
    with pytest.raises(InvalidRequestError, match="min_tokens"):
        budget(10, min_tokens=20, max_tokens=10)


def test_a_prompt_that_fills_the_context_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="at most 100"):
        budget(100)
