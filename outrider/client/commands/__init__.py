"""The `outrider` command and its subcommands.

answer_text.py             Legible text of answers for `outrider generate`: reasoning, content and
                           tool calls.
drafters.py                `outrider drafters`: adds drafters to a running router and removes them.
flags_file.py              Reads a command's flags from a YAML or TOML file, with lines such as
                           `max-model-len: 4096`.
generate.py                `outrider generate`: answers prompts, through a running router or
                           processes of its own.
keys.py                    `outrider keys new`: makes an API key and prints it; its hash goes into
                           the router's file.
main.py                    The `outrider` command: parses the command line and runs a subcommand.
models.py                  `outrider models`: pulls a model into the user's cache, or lists the
                           known models.
module_runner.py           Runs commands that need torch or Ray by replacing this process with
                           `python -m MODULE`.
placement_flags.py         Command-line flags for the placement of models and drafters on devices,
                           shared by several commands.
prompt_files.py            Prompt files of `outrider generate`: one JSON object per line.
ray_flags.py               Ray flags of `outrider serve`, which are passed to the Ray launcher.
request_flags.py           Command-line flags that set the SDK's options of a request.
serve.py                   `outrider serve`: runs router, verifiers and drafters on this machine and
                           restarts failed ones.
status.py                  `outrider status`: prints the state of a router and its fleet.
tool_files.py              Tool files of `outrider generate`: JSON with tools in the form of
                           OpenAI's API.
"""
