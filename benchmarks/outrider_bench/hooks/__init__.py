"""Hooks of benchmarks and tests: modules for the setting `hooks` (`--hook`) of verifier and
drafter. The packages that serve import none of them.

call_census.py             Hook of a drafter or a verifier: which files its calls enter, and which
                           objects they hand over.
exchange_delay.py          Hook of a drafter: it answers the rounds of an exchange between devices
                           late.
exchange_garbage.py        Hook of a drafter or a verifier: garbage lies in the buffers of an
                           exchange between devices.
relay.py                   A process that is a slow link: `python -m outrider_bench.hooks.relay
                           DELAY_MS`.
round_delay.py             Hook of a verifier: its rounds last as long as those of a larger model.
slow_link.py               Hook of a drafter: it is behind a slow link.
slow_proposer.py           Hook of a drafter: its drafts take as long as those of a slower device.
"""
