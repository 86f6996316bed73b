"""Hooks of benchmarks and tests: modules for the setting `hooks` (`--hook`) of verifier and
drafter. The packages that serve import none of them.

call_census.py             Hook of a drafter or a verifier that records the modules and classes that
                           take part in a round.
exchange_delay.py          Hook of a drafter that answers the rounds of a device exchange late.
exchange_garbage.py        Hook of a drafter or a verifier that writes garbage into the buffers of a
                           device exchange.
relay.py                   Process that acts as a slow link: `python -m outrider_bench.hooks.relay
                           DELAY_MS`.
round_delay.py             Hook of a verifier that makes its rounds last as long as those of a
                           larger model.
slow_link.py               Hook of a drafter that puts it behind a slow link.
slow_proposer.py           Hook of a drafter that makes its drafts as slow as those of a slower
                           device.
"""
