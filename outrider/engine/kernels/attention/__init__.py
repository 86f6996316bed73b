"""Attention of trees over a paged cache, and what writes, lays out and compacts that cache.

`tree` says what is computed and dispatches; `config` chooses tiles, `kernel` runs.
"""
