"""Checkpoints as files: configurations, tensor names, shapes and dtypes, and what is supported.

Nothing here reads the values of weights but for one comparison, and nothing imports torch: the
engine loads a checkpoint only after these checks, and `outrider serve` runs the same checks before
it starts a process.

directory.py               A model directory as the hub lays it out: `config.json`, and weights in
                           safetensors files.
fields.py                  Typed reads of the fields of a `config.json`; errors name the key and
                           what is allowed.
head_config.py             Configuration of a draft head, read from a checkpoint's `config.json`.
head_tensors.py            The tensors of a draft head, and the check of a head against them and
                           against its target.
model_config.py            What the engine must know about a target model, read from a Hugging Face
                           `config.json`.
model_tensors.py           The tensors of a decoder of the Llama skeleton, and the check of a
                           checkpoint against them.
quantization.py            Refusal of quantised checkpoints, whose scales the engine does not apply.
rope.py                    The rotary embedding that a Hugging Face `config.json` asks for.
safetensors_header.py      The header of a safetensors file: names, dtypes, shapes and places of its
                           tensors.
tensor_table.py            The tensors that a model consists of, and the check of a checkpoint
                           against them.
"""
