"""Benchmarks of the device engine: `outrider bench gpu NAME`."""
