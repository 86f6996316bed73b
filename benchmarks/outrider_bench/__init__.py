"""Benchmarks that anyone can run: `outrider bench NAME` is `python -m outrider_bench NAME`.

__main__.py                `python -m outrider_bench NAME`, also reachable as `outrider bench NAME`.
decoding_methods.py        Speculative, plain and transformers decoding, interleaved.
environment.py             What a result must be stored with.
models.py                  Which model, head and processes a benchmark runs; shared flags.
prompts.py                 Prompts of the benchmarks, and which answers to leave out of acceptance
                           figures.
report.py                  Output of the benchmarks.
transformers_baseline.py   Plain decoding with transformers.
"""
