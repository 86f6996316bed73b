"""K/V blocks of sessions: admission, preemption, prefix cache. It may import `state`, `exchange`
and `model_runner`.

block_manager.py           BlockManager: gives K/V blocks to sessions by admission, growth and
                           preemption.
capacity.py                Number of K/V tokens that fit into a CUDA device's memory.
preemption.py              Preemption policy: decides which sessions hold K/V, wait, or are
                           preempted.
prefix_cache.py            Prefix cache: K/V blocks that sessions leave behind, reused by later
                           sessions.
"""
