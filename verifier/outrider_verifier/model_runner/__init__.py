"""Runs rounds of the target model behind the ModelRunner protocol, on a CPU or a GPU. It may
import `state` and `exchange`.

batch.py                   Packs the rows of a round into one batch: token ids, positions, masks,
                           acceptance inputs.
cpu_runner.py              CpuModelRunner: runs target forward, acceptance and feature projection in
                           the host's loop.
grammar_preparation.py     Compiles structured-output grammars and starts the token constraints of
                           sessions.
interface.py               ModelRunner protocol: submits rounds to the CPU or GPU that computes
                           them; with its output classes.
kv_headroom.py             Number of KV slots that rounds may write past a session's committed
                           ones.
results.py                 Commits the results of a round to its sessions; row results for
                           accounting and verdicts.
swapped_sessions.py        KV copies of preempted sessions in host memory.
"""
