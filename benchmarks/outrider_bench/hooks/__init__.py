"""Hooks of benchmarks and tests: modules for the setting `hooks` (`--hook`) of verifier and
drafter. The packages that serve import none of them.

round_delay.py    verifier: rounds last as long as those of a larger model
slow_link.py      drafter: all that is exchanged with verifiers is held for a time, each way
slow_proposer.py  drafter: drafts take several times as long
relay.py          the process that holds what passes, started by slow_link.py
"""
