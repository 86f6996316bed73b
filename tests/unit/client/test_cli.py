"""The command line: flags, files, outputs, exit statuses."""

from __future__ import annotations

import json
import time
from collections.abc import Generator
from pathlib import Path

import pytest
from outrider_ray.__main__ import parse_args

from outrider.client.commands import generate, main, ray_flags, serve
from outrider.client.commands.prompt_files import read_prompts
from outrider.client.local import config as local
from outrider.client.local.model_files import ModelFiles
from outrider.errors import InvalidRequestError, NotFoundError
from outrider.spec.plan import DraftMethod
from outrider.text.tokenizer import Tokenizer
from outrider.wire.messages import SpecStats
from tests.unit.client.flags import flags_of, verifier_arguments
from tests.unit.client.served import Served


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Generator[Served]:
    with Served(tmp_path_factory.mktemp("served")) as running:
        yield running


def prompts_file(directory: Path, *entries: object) -> Path:
    file = directory / "prompts.jsonl"
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return file


def test_logprobs_are_in_the_json(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "--prompt", "x", "--max-tokens", "5", "--router", served.address]
    assert main.main([*arguments, "--logprobs", "2", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert len(answer["logprobs"]) == 5
    assert all(len(entry["top"]) == 2 and entry["logprob"] < 0 for entry in answer["logprobs"])
    assert main.main([*arguments, "--logprobs", "2"]) == 2
    assert "--logprobs needs --json" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main.main([*arguments, "--logprobs", "21", "--json"])


def test_json_is_one_object_a_prompt_in_input_order(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = prompts_file(tmp_path, *({"prompt": f"number {i}", "task": "x"} for i in range(6)))
    arguments = ["generate", "--prompts", str(file), "--max-tokens", "60", "--json"]
    assert main.main([*arguments, "--concurrency", "3", "--router", served.address]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 6
    for index, line in enumerate(lines):
        assert list(line) == ["text", "token_ids", "finish_reason", "stats"]
        assert f"number {index}" in line["text"]
        assert list(line["stats"]) == [
            "rounds",
            "emitted",
            "proposed",
            "accepted",
            "mean_emitted_per_round",
            "fallback_rounds",
            "look_ahead_rounds",
            "hit_rounds",
            "hit_accepted",
            "fresh_rounds",
            "fresh_accepted",
        ]
        stats = line["stats"]
        assert stats["emitted"] == len(line["token_ids"]) - 1
        assert stats["mean_emitted_per_round"] == round(stats["emitted"] / stats["rounds"], 4)


def test_turns_are_asked_in_one_conversation(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert served.verifier is not None
    served.verifier.specs.clear()
    file = prompts_file(tmp_path, {"turns": ["first", "second"]})
    arguments = ["generate", "--prompts", str(file), "--max-tokens", "5", "--json"]
    assert main.main([*arguments, "--router", served.address]) == 0
    (answer,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [turn["text"] for turn in answer["turns"]][-1] == answer["text"]
    tokenizer = Tokenizer.load(served.directory)
    first, second = (tokenizer.decode(spec.token_ids) for spec in served.verifier.specs)
    said = answer["turns"][0]["text"]
    assert first == "user\nfirst\nassistant\n"
    assert second == first + f"{said}\nuser\nsecond\nassistant\n"


def test_plain_output_shows_prompt_and_answer(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", "--prompt", "hello", "--max-tokens", "30", "--router", served.address]
    assert main.main(arguments) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("> hello\n")
    assert "hello" in captured.out.split("\n", 1)[1]
    assert "12 tokens" in captured.err


def test_flags_reach_the_session(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert served.verifier is not None
    flags = "--max-tokens 2 --temperature 0.8 --top-p 0.9 --seed 0 --rule rejection"
    flags += " --drafter ngram --draft-tokens 32 --draft-top-k 8 --json"
    flags += " --look-ahead 0 --fan-out 12"
    flags += " --priority -3 --min-tokens 1 --logit-bias 3=-2.5 --logit-bias 5=1"
    arguments = ["generate", "--prompt", "x", *flags.split(), "--router", served.address]
    assert main.main(arguments) == 0
    spec = served.verifier.specs[-1]
    assert (spec.sampling.temperature, spec.sampling.top_p, spec.sampling.seed) == (0.8, 0.9, 0)
    assert (spec.sampling.rule, spec.priority) == ("rejection", -3)
    assert (spec.min_new_tokens, spec.sampling.logit_bias) == (1, ((3, -2.5), (5, 1.0)))
    assert (spec.plan.method, spec.plan.draft_tokens, spec.plan.top_k) == ("ngram", 32, 8)
    assert (spec.plan.look_ahead, spec.plan.fan_out) == (0, 12)
    capsys.readouterr()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["generate"], "--prompt"),
        (["generate", "--prompt", "a", "--prompts", "b"], "not allowed with"),
        (["generate", "--prompt", "a", "--max-tokens", "0"], "at least 1"),
        (["generate", "--prompt", "a", "--max-tokens", "many"], "not an integer"),
        (["generate", "--prompt", "a", "--seed", str(2**64)], "64 bits"),
        (["generate", "--prompt", "a", "--rule", "magic"], "rejection"),
        (["generate", "--prompt", "a", "--drafter", "crystal"], "eagle3"),
        (["generate", "--prompt", "a", "--priority", "101"], "[-100, 100]"),
        (["generate", "--prompt", "a", "--look-ahead", "2"], "0, 1 or auto"),
        (["generate", "--prompt", "a", "--fan-out", "65"], "at most 64"),
        (["serve", "--look-ahead", "yes"], "0, 1 or auto"),
        (["generate", "--prompt", "a", "--no-such-flag"], "--no-such-flag"),
        (["generate", "--prompt", "a", "--max-token", "3"], "--max-token"),
        (["no-such-command"], "no-such-command"),
        ([], "COMMAND"),
    ],
)
def test_bad_flags_exit_with_status_2_and_say_why(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main.main(flags)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"prompt": "a"}\n{"prompt": 3}\n', ":2"),
        ('{"prompt": "a"\n', "not JSON"),
        ('{"turns": []}\n', "turns"),
        ('{"turns": ["a", 1]}\n', "turns"),
        ('{"prompt": "a", "turns": ["b"]}\n', "turns"),
        ("[]\n", ":1"),
        ("\n", "no prompts"),
    ],
)
def test_a_bad_prompts_file_exits_with_status_2_and_names_the_line(
    tmp_path: Path, content: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(content)
    assert main.main(["generate", "--prompts", str(file), "--router", "127.0.0.1:1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("outrider: ") and says in error and "Traceback" not in error


def test_a_missing_prompts_file_exits_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["generate", "--prompts", "/nowhere.jsonl", "--router", "127.0.0.1:1"]) == 2
    assert "/nowhere.jsonl" in capsys.readouterr().err


def test_line_separators_inside_a_prompt_do_not_split_the_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a\u2028b"}\n', encoding="utf-8")
    assert read_prompts(file) == [("a\u2028b",)]


def test_a_request_that_the_server_refuses_exits_with_status_2(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", "--prompt", "a", "--temperature", "-1", "--router", served.address]
    assert main.main(arguments) == 2
    assert "temperature" in capsys.readouterr().err


def test_an_unreachable_router_exits_with_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("outrider.client.retry.RetryPolicy.delay_s", lambda *_: None)
    assert main.main(["generate", "--prompt", "a", "--router", "127.0.0.1:1"]) == 1
    assert capsys.readouterr().err.startswith("outrider: ")


def test_unknown_models_and_heads_exit_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["generate", "--prompt", "a", "--model", "no-such-model"]) == 2
    assert "no-such-model" in capsys.readouterr().err
    assert main.main(["generate", "--prompt", "a", "--head", str(tmp_path)]) == 2
    assert "no draft head" in capsys.readouterr().err


def parsed(*flags: str) -> local.LocalFleetConfig:
    args = main.make_parser().parse_args(["generate", "--prompt", "a", *flags])
    files = ModelFiles(name="tiny", path=Path("/models/tiny"), head=Path("/heads/tiny"))
    return generate.local_config(args, files, 1)


def test_the_processes_get_only_what_their_method_needs() -> None:
    default = parsed()
    assert default.methods == (DraftMethod.EAGLE3,)
    assert "--feature-head" in verifier_arguments(default)
    assert parsed("--drafter", "none").methods == ()
    ngram = parsed("--drafter", "ngram", "--dtype", "bfloat16")
    assert "--feature-head" not in verifier_arguments(ngram)
    assert "bfloat16" in verifier_arguments(ngram)
    assert parsed("--drafter", "model").draft_model == Path("/models/tiny")


def test_a_method_without_its_files_is_refused() -> None:
    args = main.make_parser().parse_args(["generate", "--prompt", "a", "--drafter", "eagle3"])
    with pytest.raises(InvalidRequestError, match="--head"):
        generate.local_config(args, ModelFiles(name="m", path=Path("m"), head=None), 1)


def test_serve_offers_what_the_files_allow_unless_told() -> None:
    assert serve.parse_methods(None, has_head=True) == (DraftMethod.EAGLE3, DraftMethod.NGRAM)
    assert serve.parse_methods(None, has_head=False) == (DraftMethod.NGRAM,)
    assert serve.parse_methods("ngram, model", has_head=True) == (
        DraftMethod.NGRAM,
        DraftMethod.MODEL,
    )
    assert serve.parse_methods("none", has_head=True) == ()
    with pytest.raises(InvalidRequestError, match="eagle3"):
        serve.parse_methods("magic", has_head=True)


def test_models_list_tells_what_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["models", "list", "--json"]) == 0
    entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert "smollm2-135m" in [entry["name"] for entry in entries]
    assert main.main(["models", "list"]) == 0
    assert "Apache-2.0" in capsys.readouterr().out


def test_models_pull_of_an_unknown_name_exits_with_status_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main.main(["models", "pull", "no-such-model"]) == 2
    assert "no-such-model" in capsys.readouterr().err


def test_commands_of_their_own_get_every_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[tuple[str, list[str]]] = []

    def record(module: str, args: list[str]) -> int:
        runs.append((module, args))
        return 7

    monkeypatch.setattr(main, "run_module", record)
    assert main.main(["bench", "local", "--json"]) == 7
    assert main.main(["train-head", "--help"]) == 7
    assert runs == [
        ("outrider_bench", ["local", "--json"]),
        ("outrider.engine.training", ["--help"]),
    ]


def test_a_command_that_is_not_installed_says_so() -> None:
    from outrider.client.commands.module_runner import run_module

    with pytest.raises(NotFoundError, match="no_such_package"):
        run_module("no_such_package.x", [])


def test_interrupting_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "run", interrupt)
    assert main.main(["generate", "--prompt", "a"]) == main.EXIT_INTERRUPTED


def test_status_shows_the_fleet(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert served.verifier is not None
    served.verifier.change_info(
        in_process_methods=(DraftMethod.EAGLE,),
        simulated_acceptance="2.6",
        stats=SpecStats(
            look_ahead_rounds=10, hit_rounds=7, hit_accepted=14, fresh_rounds=2, fresh_accepted=5
        ),
        hit_idle_us_p50=93.4,
    )
    try:
        deadline = time.monotonic() + 5
        while True:
            assert main.main(["status", "--router", served.address]) == 0
            shown = capsys.readouterr().out
            if "SIMULATED ACCEPTANCE 2.6" in shown:
                break
            assert time.monotonic() < deadline, shown
        assert "drafts itself (eagle)" in shown
        assert "look-ahead: 70% of rounds are hits, 2.00 draft tokens accepted in a hit" in shown
        assert "93 us between rounds of hits" in shown
        assert main.main(["status", "--router", served.address, "--json"]) == 0
        info = json.loads(capsys.readouterr().out)
        assert info["verifiers"][0]["simulated_acceptance"] == "2.6"
        assert info["verifiers"][0]["stats"]["hit_rounds"] == 7
        arguments = ["generate", "--prompt", "a", "--max-tokens", "2", "--router", served.address]
        assert main.main(arguments) == 0
        assert "SIMULATED ACCEPTANCE 2.6" in capsys.readouterr().err
    finally:
        served.verifier.change_info(
            in_process_methods=(), simulated_acceptance="", stats=SpecStats(), hit_idle_us_p50=0.0
        )


def test_a_head_in_the_verifier_needs_no_drafter() -> None:
    config = parsed("--placement", "fused", "--draft-length", "5", "--simulated-acceptance", "3")
    flags = flags_of(verifier_arguments(config))
    assert (flags["placement"], flags["draft-length"]) == ("fused", "5")
    assert (flags["feature-head"], flags["simulated-acceptance"]) == ("/heads/tiny", "3")
    assert config.drafter_methods == ()
    with pytest.raises(InvalidRequestError, match="eagle3"):
        parsed("--placement", "colocated", "--drafter", "ngram")


def test_serve_passes_placing_on_to_ray() -> None:
    args = main.make_parser().parse_args(["serve", "--device", "cuda", "--placement", "fused"])
    config = local.LocalFleetConfig(
        model=Path("/m"), head=Path("/h"), methods=(DraftMethod.EAGLE3,), **serve.placement_of(args)
    )
    arguments = serve.ray_args(config)
    flags = flags_of(arguments)
    assert (flags["placement"], flags["device"], flags["dtype"]) == ("fused", "cuda", "bfloat16")
    assert "--no-cuda-graphs" not in arguments


def test_serve_passes_rays_own_flags_on() -> None:
    given = ["--ray-address", "auto", "--ray-strategy", "strict-pack", "--ray-exchange", "refs"]
    given += ["--ray-gpus-per-actor", "0.5", "--ray-cpus-per-actor", "4"]
    args = main.make_parser().parse_args(["serve", "--runtime", "ray", *given])
    config = parse_args(["--model", "m", *ray_flags.ray_flags(args)])
    assert (config.ray_address, config.strategy, config.exchange) == ("auto", "strict-pack", "refs")
    assert (config.gpus_per_actor, config.cpus_per_actor) == (0.5, 4.0)


@pytest.mark.parametrize(
    "flags",
    [["--ray-exchange", "refs"], ["--runtime", "ray", "--drafter-device", "cuda:1"]],
)
def test_flags_that_mean_nothing_to_the_runtime_are_refused(flags: list[str]) -> None:
    args = main.make_parser().parse_args(["serve", *flags])
    with pytest.raises(InvalidRequestError, match=flags[-2]):
        ray_flags.ray_flags(args)
