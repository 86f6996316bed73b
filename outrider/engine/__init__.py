"""The inference engine in torch: target models, draft heads, KV cache, logits processor and
acceptance. It may import `spec` and `checkpoints`.

acceptance.py              Acceptance rules of speculative decoding: accepted path and next token of
                           every row.
attention.py               PyTorch attention of ragged segments over the KV pool.
block_allocator.py         Allocators of free KV blocks: extents for contiguous sequences, a stack
                           for block tables.
block_refcounts.py         Reference counts of the blocks of a KV pool, with LRU eviction of cached
                           blocks.
checkpoint.py              Checkpoint reader: configuration and tensors of safetensors or GGUF
                           models, under Hugging Face names.
draft_sampling.py          Draft token selection: the children of every draft row, by acceptance
                           rule.
gguf.py                    GGUF reader: configuration, tensors under Hugging Face names, tokenizer
                           metadata.
invariant_segments.py      Batch-invariant attention on CPUs: a row's result does not depend on the
                           other rows of its batch.
kv_cache.py                KV cache: one pool of fixed-size blocks that holds the keys and values
                           of many sequences.
layers.py                  Decoder layer of Llama-style models: fused weights, rotary embedding and
                           forward.
linear.py                  Linear layers over weights packed for oneDNN, or over plain weights if
                           this CPU cannot pack them.
logits_processor.py        Logits processor: turns raw logits into the sampling distribution, for
                           verifier and drafter.
logprobs.py                Log-probabilities of emitted tokens under the target's unprocessed
                           logits.
matmul_tuning.py           Selection of the fastest matrix product for a single float32 row on this
                           CPU.
model_loader.py            Model loader: builds a target or a small draft model with fused, packed
                           weights.
noise.py                   PyTorch implementation of `outrider.spec.noise`, and Gumbel-perturbed
                           argmax and top-k.
residual.py                Recursive rejection sampling at one node, on the few ids of the draft
                           distribution (float64).
swap.py                    Swap space: KV of suspended sequences in host memory.
swap_paths.py              Copy paths of KV blocks between a pool and host memory: direct, or staged
                           on a CUDA device.
target.py                  Target model: one forward over ragged rows of many sequences.
truncation.py              Truncation thresholds of top-k, top-p and min-p, identical to the bit on
                           every device.
weight_copies.py           Background threads that copy a model's weights while its kernels are
                           compiled.
"""
