"""Messages between the processes as dataclasses, and their codecs from and to protobuf bytes.
This package may import `spec`.

arrays.py                  Arrays of messages: dense arrays, and the feature vectors of tokens as
                           rows.
bundles.py                 Message bundles: several encoded messages in one frame, joined and split
                           without parsing.
checks.py                  Validation helpers of the codecs; each raises InvalidMessageError with
                           the allowed values.
codec.py                   Public entry point of `outrider.wire`: converts internal messages to
                           bytes and back.
common_codec.py            Codec of types that several messages share: enums, sampling, plans and
                           statistics.
control_codec.py           Codec of control RPCs: GetInfo, SetPlan, CloseSession, Drain, and Attach
                           and Detach of drafters.
device_exchange.py         Messages about a replica: a drafter's copy of a verifier's session slots
                           and block tables.
device_exchange_codec.py   Codec of the messages about a replica; decoding validates every field.
exchange_codec.py          Codec of exchange messages (verifier and drafter); decoding validates
                           every field.
inference.py               Public inference API as dataclasses: requests and answers of clients and
                           router.
inference_codec.py         Codec of the public API's requests; `inference_response_codec` has the
                           answers.
inference_response_codec.py Codec of responses of the inference API: generate results, stream events
                           and resumed streams.
limits.py                  Size limits of everything that a peer may send.
logprobs.py                Log-probabilities of emitted tokens: per token, and as columns of a
                           round's events.
messages.py                Internal messages between router, verifier and drafter, as plain
                           dataclasses.
pool_codec.py              Codec of the messages of `PoolService`: adding and removing drafters.
protocol_check.py          Check of the protocol version that a peer reports in a handshake.
round_codec.py             Codec of `Verdicts` and `Proposals` that avoids copies of arrays.
rounds.py                  Messages with the verdicts of a round or the proposals of a draft batch,
                           as columns.
server_info.py             Information that verifiers and drafters give about themselves: identity,
                           capacity, load.
server_info_codec.py       Codec of abort requests, server info and the model list of the public
                           API.
session_codec.py           Codec of the session stream between router and verifier.
spec_stats_accumulator.py  Accumulation of a session's speculation statistics, and texts of the
                           planner's decisions.
stats.py                   Speculation statistics of a session.
tensors.py                 Array element types on the wire and in numpy, and packing of vectors as
                           bytes.
"""
