"""K/V blocks of sessions: admission, preemption, prefix cache. It may import `state`, `exchange`
and `model_runner`.

block_manager.py           Gives K/V blocks to sessions: admission, growth, preemption.
capacity.py                Number of K/V tokens that fit into GPU memory.
preemption.py              Policy that picks which sessions hold K/V and which are preempted.
prefix_cache.py            Reuses K/V blocks of shared prefixes.
"""
