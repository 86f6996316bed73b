"""The drafter process: keeps draft models beside a verifier's sessions and proposes draft trees.

sessions    what is known of each session; table: all of them in columns, and the checks of verdicts
held_*      features that arrived, until they are used
source      the seam between the engine and the ways of drafting
growth      draft trees as pure state machines: chain, best-first beam, static shape
grow        drives growths of many sessions through one draft model, level by level
ancestry    which draft rows see which
row_*       row_following: what every source with K/V of its own rows does, wherever it is
head_*      EAGLE heads, drafting on the host; headkv: their K/V and attention
device_*    a head or a small model (device_drafter) on an accelerator: rows, batches, whole drafts
            as one launch
ngram       prompt lookup
small_model a separate small language model
engine      messages in, proposals out; single-threaded, no I/O
fair        turns of the verifiers: whose messages, whose drafts
worker      the one drafting thread
service     connections to verifiers, and the control interface
slow_*      what benchmarks make it suffer: a link that holds everything (through relay, a process),
            a device that takes longer
metrics     Prometheus metrics, and the figures of `DrafterInfo`
config      settings; build: from them to loaded sources and a service; __main__: the process
"""

from outrider.compiled import require_one_build

require_one_build(__file__)
