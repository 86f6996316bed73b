"""KV blocks of sessions: admission, preemption, prefix cache. It may import `state`, `exchange`
and `model_runner`.

block_manager.py           BlockManager: gives KV blocks to sessions by admission, growth and
                           preemption.
capacity.py                Number of KV tokens that fit into a CUDA device's memory.
preemption.py              Preemption policy: decides which sessions hold KV, wait, or are
                           preempted.
prefix_cache.py            Prefix cache: keeps KV blocks of sessions, so that later sessions with
                           the same prefix reuse them.
"""
