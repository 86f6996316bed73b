"""The ModelRunner of a GPU: captured graphs, device slots, launches and their results. It may
import what `model_runner` may.

decoded_results.py         Reads the results of a launch from host memory.
device_slots.py            Assigns device slots to sessions and updates their state on the GPU.
grammar_drafts.py          In-process drafts for sessions with a grammar.
launch_groups.py           Groups the rows of a round into GPU launches.
round_times.py             Measured round durations by batch shape.
runner.py                  ModelRunner that runs rounds as captured GPU graphs.
shape_family.py            Batch shapes to capture for a verifier's configuration.
"""
