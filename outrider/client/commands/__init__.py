"""The `outrider` command and its subcommands.

drafters.py                `outrider drafters`.
flags_file.py              A file of a command's flags, in YAML or TOML: `max-model-len: 4096`.
generate.py                `outrider generate`.
keys.py                    `outrider keys`.
main.py                    The `outrider` command.
models.py                  `outrider models`.
module_runner.py           Runs commands that are separate programs.
placement_flags.py         Flags for device placement.
prompt_files.py            Prompt files of `outrider generate`.
ray_flags.py               Flags for Ray.
request_flags.py           Flags of a request.
serve.py                   `outrider serve`.
status.py                  `outrider status`.
"""
