"""The ModelRunner of a GPU: captured graphs, device slots, launches and their results. It may
import what `model_runner` may.

decoded_results.py         Decodes the result words of a GPU launch into accepted tokens, features
                           and log-probabilities.
device_slots.py            Assigns device slots to sessions and uploads changes of their state to
                           the GPU.
grammar_drafts.py          In-process drafts of sessions with a grammar: chains level by level, and
                           trees.
launch_groups.py           Groups the rows and prefill chunks of a round into GPU launches.
round_times.py             Round durations on the device by batch shape, as measured at startup.
runner.py                  GpuModelRunner: runs rounds on the GPU, where acceptance and next tokens
                           are decided.
shape_family.py            Batch shapes to capture as GPU graphs, from the verifier's settings.
"""
