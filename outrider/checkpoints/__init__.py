"""Checkpoints as files: configurations, tensor names, shapes and dtypes, and what is supported.

The modules do not import torch, and they read the values of weights only to compare a duplicate
output projection with the embedding. The engine loads a checkpoint only after these checks, and
`outrider serve` runs the same checks before it starts a process.

directory.py               Reads and checks a model directory in the hub's layout: `config.json` and
                           safetensors files.
fields.py                  Typed reads of `config.json` fields; errors name the key and what is
                           allowed.
gguf_reader.py             Opens GGUF files with the `gguf` package and reads their metadata.
head_config.py             Draft-head configuration (`HeadConfig`), read from a checkpoint's
                           `config.json`.
head_tensors.py            Tensors that a draft head must have, and the check of a head against its
                           target.
model_config.py            Target-model configuration (`ModelConfig`), read from a Hugging Face
                           `config.json`.
model_tensors.py           Tensors that a Llama-style decoder must have, and the check that a
                           checkpoint holds them.
quantization.py            Refusal of quantised checkpoints, whose scales the engine does not apply.
rope.py                    RoPE settings (theta and frequency scaling), read from a Hugging Face
                           `config.json`.
safetensors_header.py      Safetensors header reader: names, dtypes, shapes and offsets of a file's
                           tensors.
tensor_table.py            Table of the tensors that a model requires, and the check of a checkpoint
                           against it.
"""
