"""Benchmarks that anyone can run: `outrider bench NAME` is `python -m outrider_bench NAME`."""
