"""Models, drivers and drawings that the GPU benchmarks share.

bench.py                   Flags, models and tables shared by the GPU benchmarks.
draft_ablation.py          Two ideas measured in whole drafts.
load_driver.py             Drives many sessions through a verifier service.
machine.py                 Facts about the GPU machine.
random_model.py            Models with random weights, and widened models.
services.py                Builds verifier services for the benchmarks.
steps.py                   Times the verify graph and the draft graph.
svg.py                     Draws a timeline as SVG.
timeline.py                Host and device spans of a run of rounds.
trace.py                   Writes timelines in Trace Event Format.
tree_scores.py             Trees ranked by products of probabilities.
widened_files.py           Writes a widened model to disk.
widening.py                Widens a small model to the cost of a large one.
"""
