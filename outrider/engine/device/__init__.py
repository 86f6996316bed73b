"""The device engine: rounds that run from static buffers, so that a CUDA graph can replay them.

brake.py                   Rounds that last as long as those of a larger model (benchmarks only).
current_device.py          Current CUDA device of a thread.
device_timeline.py         Device times of what was launched, for timelines and the idle time
                           between two forwards.
logprobs.py                What the target thought of the tokens that a round emitted, for the
                           sessions that ask.
round_launcher.py          Rounds on the device.
round_program.py           What one round computes on the device, as functions of static tensors.
target_program.py          Target model's forward over static buffers.
warm_up.py                 Capturing and timing every shape of a family before the first request.
"""
