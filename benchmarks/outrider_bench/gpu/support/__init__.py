"""Models, drivers and drawings that the GPU benchmarks share.

benchmark_context.py       Benchmark context: arguments, models and device that the GPU benchmarks
                           of one run share.
draft_ablation.py          Ablation of whole drafts: product-ranked trees, and chains chosen after a
                           softmax.
load_driver.py             Load driver: runs many concurrent sessions through a verifier service and
                           records streams.
machine.py                 Constants of the GPU machine for benchmarks; imports nothing that needs a
                           GPU.
random_model.py            Models built in device memory: random weights in a large shape, or a
                           widened small model.
services.py                Verifier services for the benchmarks. Only this module knows how the
                           engine is constructed.
steps.py                   Device times of single parts of a round: the verify graph and the draft
                           graph.
svg.py                     SVG rendering of a timeline: one row per track, one bar per span, a scale
                           in milliseconds.
timeline.py                Timeline of a run of rounds: host spans, device spans, and the gaps
                           between them.
trace.py                   Timeline files in Trace Event Format, for Perfetto and chrome://tracing.
tree_scores.py             Draft trees ranked by bfloat16 products of probabilities, compared with
                           sums of log-probs.
widened_files.py           Checkpoints of a widened model and its head, written to disk in the usual
                           format.
widening.py                Widening of a small Llama model and its EAGLE-3 head: same function, cost
                           of a large model.
"""
