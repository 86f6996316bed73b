"""Training an EAGLE-3 head for a Llama-skeleton target: `outrider train-head`.

target.py    the frozen target: packed forward with taps, batched decoding state
data.py      prompts, chat template, packing of samples into fixed-shape batches
generate.py  answers by the target itself, refilled batch decoding
vocab.py     the draft vocabulary, counted on those answers
head.py      the trainable head
model.py     its unrolled forward (training-time test)
loop.py      optimisation: learning-rate trial runs, then one long run
report.py    accuracy by draft step and simulated tokens a round of chains
drafting.py  drafts by the serving pieces, many answers at a time
serving.py   tokens a round of such drafts, in lock-step and with look-ahead
export.py    checkpoints in the original EAGLE-3 format
check.py     training forward against serving forward, tensor by tensor
cli.py       drives them in that order
"""
