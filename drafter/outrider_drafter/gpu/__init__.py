"""Proposers that draft with captured CUDA graphs. This package may import `state` and `proposers`.

batch.py                   Static input buffers of a draft launch: stages the rows of a batch and
                           uploads them.
draft_launcher.py          Launches drafts for sessions or outcomes on the GPU and reads the results
                           back.
draft_model.py             Common interface of EAGLE heads and small models on the GPU.
draft_results.py           Converts packed int32 draft output of the GPU into chains, trees and
                           their draft distributions.
draft_slots.py             Per-session state of the GPU proposer in host arrays: device slot, KV
                           rows, draft shape.
eagle.py                   GpuEagleProposer: EAGLE-3 proposer on the GPU.
grammar_masks.py           Grammar masks of one draft launch, and truncation of its drafts to what
                           grammars allow.
kv_writer.py               Writes the KV of a session's catch-up rows with graphs that are captured
                           for a few sizes.
look_ahead.py              Look-ahead on the GPU: scores pending proposals, then drafts for their
                           outcomes.
outcome_drafting.py        Drafts on the GPU for outcomes of the last scored proposals, with one
                           launch for each shape.
outcome_scoring.py         Scores candidate tokens after every node of pending proposals on the GPU.
paged_kv.py                Paged KV cache of the draft model: slots, blocks and sampling state of
                           followed sessions.
proposer.py                GpuProposer: proposer whose drafts are single GPU launches, for an EAGLE
                           head or a small model.
replicas.py                Draft replicas for verifiers of this host that exchange data directly
                           between GPUs.
scoring_layout.py          Layout of pending proposals' nodes in a scoring launch, and the paths to
                           their outcomes.
session_slots.py           Assigns device slots and KV blocks to followed sessions and brings them
                           up to date.
shapes.py                  Draft shapes and batch sizes captured as GPU graphs, and the sessions
                           that they support.
small_model.py             GpuSmallModelProposer: small-model proposer on the GPU.
"""
