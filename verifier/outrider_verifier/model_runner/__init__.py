"""Runs rounds of the target model behind the ModelRunner protocol, on a CPU or a GPU. It may
import `state` and `exchange`.

batch.py                   Packs the rows of a round into one batch: token ids, positions, masks,
                           acceptance inputs.
cpu_runner.py              CpuModelRunner: runs the target's forward pass, acceptance and feature
                           projection on the host.
grammar_preparation.py     Compiles structured-output grammars and starts the token constraints of
                           sessions.
interface.py               Defines the `ModelRunner` protocol, which CPU and GPU runners implement,
                           and its result classes.
kv_headroom.py             Computes the number of KV slots that rounds may write beyond a session's
                           committed ones.
results.py                 Commits the results of a round to its sessions, and collects what
                           accounting and verdicts need.
swapped_sessions.py        Keeps copies of the KV of preempted sessions in host memory.
"""
