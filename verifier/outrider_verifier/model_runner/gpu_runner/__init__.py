"""The ModelRunner of a GPU: captured graphs, device slots, launches and their results. It may
import what `model_runner` may.

decoded_results.py         Decodes the result words of a GPU launch into accepted tokens, features
                           and log-probabilities.
device_slots.py            Assigns device slots to sessions and uploads changes of their state to
                           the GPU.
grammar_drafts.py          Restricts in-process drafts to the grammars of their sessions, for chains
                           and for trees.
launch_groups.py           Assigns the decode rows and prefill chunks of a round to GPU launches.
round_times.py             Round durations on the device by batch shape, as measured at startup.
runner.py                  GpuModelRunner: runs rounds on the GPU, including acceptance and
                           sampling.
shape_family.py            Chooses the batch shapes to capture as CUDA graphs from the verifier's
                           settings.
"""
