"""Training an EAGLE-3 head for a Llama-skeleton target: `outrider train-head`.

__main__.py                `python -m outrider.engine.training`.
answer_generation.py       Generates training answers with the target model.
cli.py                     `outrider train-head`.
data.py                    Prompts, the chat template, and packing of samples into batches of one
                           fixed shape.
drafting.py                Drafts of many answers at once by the serving pieces, over known texts.
export.py                  Writing a trained head in the original EAGLE-3 checkpoint format.
head.py                    The trainable EAGLE-3 head.
held_out_report.py         Held-out metrics of a head.
parity_check.py            Compares the training and the serving forward.
serving_report.py          Tokens per round of a head, measured with the serving code.
target.py                  The frozen target model for training.
trainer.py                 The training loop.
unrolled_forward.py        Unrolled training forward of a head.
vocab.py                   The draft vocabulary.
"""
