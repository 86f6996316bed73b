"""The swap benchmark runs without an accelerator: the same steps, no meaning."""

from __future__ import annotations

import argparse

from outrider_bench.gpu import cli, swap
from outrider_bench.gpu.support.benchmark_context import Bench


def test_a_session_goes_and_comes_back_beside_others() -> None:
    placement = "fused"
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    flags = ["--device", "cpu", "--dtype", "float32", "--shape", "tiny", "--batches", "2"]
    flags += ["--prompt-tokens", "16", "--output-tokens", "96", "--placements", placement]
    bench = Bench(parser.parse_args(["swap", *flags]))
    try:
        facts = swap.run(bench)["by_placement"]
    finally:
        bench.close()
    assert isinstance(facts, dict) and list(facts) == [placement]
    assert facts[placement]["swaps"] >= 3
    assert facts[placement]["out_ms"] > 0.0 and facts[placement]["back_ms"] > 0.0
