"""The device engine: rounds that run from static buffers, so that a CUDA graph can replay them.

current_device.py          Checks whether devices are usable, and sets the current device of a
                           thread.
device_timeline.py         Times of device work by CUDA events, for timelines and for idle times
                           between forward passes.
logprobs.py                Log-probabilities of emitted tokens on the device, for the sessions that
                           request them.
round_launcher.py          Launches rounds on the device: verification, acceptance, commit, feature
                           projection and drafting.
round_program.py           Computation of one round as functions of static tensors, recorded into a
                           CUDA graph.
target_kernels.py          Kernels of the target's forward pass: the fastest ones, or
                           batch-invariant ones.
target_program.py          Forward pass of the target over static tensors, recorded into a CUDA
                           graph.
trial_capture.py           Trial captures: they record which kernels a graph needs, execute nothing,
                           and are discarded.
warm_up.py                 Warm-up: compiles, captures and times every shape of a `ShapeFamily`
                           before the first request.
"""
