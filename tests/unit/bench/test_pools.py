"""Where a benchmark's pools of processes compute."""

from __future__ import annotations

from outrider_bench.pools import gpu_places


def test_processes_have_a_gpu_each_where_there_are_as_many() -> None:
    assert gpu_places(3, 1, 4) == [["--device", f"cuda:{i}"] for i in range(4)]


def test_a_verifier_that_shares_a_gpu_leaves_memory_to_the_others() -> None:
    alone, beside = gpu_places(2, 2, 2), gpu_places(4, 0, 2)
    share = ["--memory-fraction", "0.700"]
    assert alone == [
        ["--device", "cuda:0", *share],
        ["--device", "cuda:1", *share],
        ["--device", "cuda:0"],
        ["--device", "cuda:1"],
    ]
    assert [place[-1] for place in beside] == ["0.350"] * 4


def test_without_gpus_nothing_is_said_of_devices() -> None:
    assert gpu_places(2, 1, 0) == [[], [], []]
