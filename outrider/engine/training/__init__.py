"""Training an EAGLE-3 head for a Llama-skeleton target: `outrider train-head`.

__main__.py                Entry point `python -m outrider.engine.training`: the same command as
                           `outrider train-head`.
answer_generation.py       Generation of training answers by the target: batch decoding with
                           continuous slot refill.
cli.py                     Command `outrider train-head`: answers, vocabulary, training, metrics,
                           parity check.
data.py                    Training data: prompts, chat template, and packing of samples into
                           fixed-shape batches.
drafting.py                Batched drafting for known answers with the serving code, for offline
                           evaluation of a head.
export.py                  Export of a trained head in the original EAGLE-3 checkpoint format.
head.py                    Trainable EAGLE-3 head with fp32 master weights.
held_out_report.py         Held-out metrics of a head: accuracy by draft step and simulated tokens
                           per round of chains.
parity_check.py            Parity check between the training forward and the serving forward of a
                           head, on one prompt.
serving_report.py          Tokens per round of a trained head, simulated with the serving code over
                           greedy answers.
target.py                  Frozen target model for training: a minimal forward of Llama-style
                           models.
trainer.py                 Trainer of a draft head: short learning-rate trials, then one long run.
unrolled_forward.py        Unrolled forward of a trainable EAGLE-3 head (training-time test).
vocab.py                   Draft vocabulary builder: the target ids that are most frequent in
                           answers.
"""
