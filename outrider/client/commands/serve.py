"""`outrider serve`: runs router, verifiers and drafters on this machine and restarts failed
ones."""

from __future__ import annotations

import argparse
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

from outrider.client.commands.module_runner import run_module
from outrider.client.commands.placement_flags import (
    DTYPE_HELP,
    HEAD_HELP,
    MODEL_HELP,
    add_placement_arguments,
    placement_of,
)
from outrider.client.commands.ray_flags import add_ray_arguments, ray_flags
from outrider.client.flags import (
    add_look_ahead_arguments,
    fraction,
    integer_at_least,
    number_at_least,
)
from outrider.client.local.cluster import LocalCluster, print_progress
from outrider.client.local.config import (
    DRAIN_S,
    HEALTH_TIMEOUT_S,
    SHARED_MEMORY_FRACTION,
    LocalFleetConfig,
)
from outrider.client.local.model_files import DEFAULT_MODEL, find_model
from outrider.client.local.preflight import check_files
from outrider.client.local.settings_check import ray_warnings
from outrider.client.local.supervisor import Supervisor
from outrider.errors import InvalidRequestError
from outrider.signals import stop_signals
from outrider.spec.exchange_mode import AUTO
from outrider.spec.plan import DraftMethod
from outrider.transport.tls import CertificateRole

POLL_INTERVAL_S = 0.2
"""Interval between two checks of the processes, in seconds."""
SIGNAL_EXIT_BASE = 128
"""Number that is added to the signal number for the exit status of a process that a signal ended,
as in shells."""
RAY_MODULE = "outrider_ray"
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
CONFIG_HELP = (
    "YAML (.yaml, .yml) or TOML file whose keys are these flags without their dashes. Flags on the "
    "command line override the file."
)
SERVED_NAME_HELP = "Model name that clients send (default: the name or hub id of --model)."
MAX_LEN_HELP = "Largest number of prompt and output tokens together (default: the model's limit)."
PLANNER_HELP = (
    "Whether the verifier adapts speculation to measurements, or always carries out what requests "
    "ask for (default: automatic)."
)
METHODS_HELP = (
    "Comma-separated draft methods that requests may use: eagle3, eagle, ngram, model; or none. "
    "Requests without a method use eagle3 if it is listed, else the first one."
)
UTILIZATION_HELP = (
    "Fraction of a GPU's memory that a verifier may use, weights included (default: 0.9, or "
    f"{SHARED_MEMORY_FRACTION:g} if a drafter uses the same GPU)."
)
HEALTH_TIMEOUT_HELP = (
    "Seconds without an answer to health checks after which a process is killed and restarted; "
    f"0: never (default: {HEALTH_TIMEOUT_S:g})."
)
DRAIN_HELP = f"Seconds that running requests get to finish after SIGTERM (default: {DRAIN_S:g})."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags to a parser."""
    add = parser.add_argument
    add(
        "--runtime",
        choices=("processes", "ray"),
        default="processes",
        help="Whether to run local processes or Ray actors (default: processes).",
    )
    add("--config", metavar="FILE", type=Path, help=CONFIG_HELP)
    add("--model", metavar="NAME|DIR|HUB-ID", default=DEFAULT_MODEL, help=MODEL_HELP)
    add("--revision", metavar="REV", help="Branch, tag or commit of a --model from the hub.")
    add("--served-model-name", metavar="NAME", help=SERVED_NAME_HELP)
    add("--max-model-len", type=integer_at_least(1), metavar="TOKENS", help=MAX_LEN_HELP)
    add("--head", metavar="DIR|HUB-ID", help=HEAD_HELP)
    add("--head-revision", metavar="REV", help="Branch, tag or commit of a --head from the hub.")
    add("--draft-model", metavar="NAME|DIR|HUB-ID", help="Draft model of the method model.")
    add(
        "--draft-model-revision",
        metavar="REV",
        help="Branch, tag or commit of a --draft-model from the hub.",
    )
    add("--drafter-methods", metavar="A,B", help=METHODS_HELP)
    add(
        "--verifiers",
        type=integer_at_least(1),
        metavar="N",
        default=1,
        help="Number of verifier processes (default: 1).",
    )
    add(
        "--drafters",
        type=integer_at_least(1),
        metavar="N",
        default=1,
        help="Number of drafter processes (default: 1).",
    )
    add(
        "--routers",
        type=integer_at_least(1),
        metavar="N",
        default=1,
        help="Number of router processes that share one address (default: 1).",
    )
    add(
        "--host",
        default="127.0.0.1",
        help="Address on which the router's gRPC API listens (default: 127.0.0.1).",
    )
    add(
        "--port",
        type=integer_at_least(0),
        default=50050,
        help="Port of the router's gRPC API; 0: a free port (default: 50050).",
    )
    add(
        "--http",
        metavar="HOST:PORT",
        help="Address of the OpenAI-compatible HTTP API (default: no HTTP API).",
    )
    add("--dtype", choices=("float32", "bfloat16"), help=DTYPE_HELP)
    add_placement_arguments(parser)
    add("--planner", choices=("automatic", "fixed"), help=PLANNER_HELP)
    add(
        "--draft-top-k",
        type=integer_at_least(1),
        metavar="K",
        help="Branching factor of the draft tree of a head in the verifier (default: 1, a chain).",
    )
    add_look_ahead_arguments(add)
    add("--gpu-memory-utilization", type=fraction, metavar="F", help=UTILIZATION_HELP)
    add(
        "--kv-tokens",
        type=integer_at_least(1),
        metavar="N",
        help="KV cache size of each verifier in tokens (default: what fits into the GPU's memory, "
        "or 32768 on a CPU).",
    )
    add(
        "--no-prefix-cache",
        action="store_true",
        help="Disable prefix caching: compute every prompt from its first token.",
    )
    add(
        "--max-sessions",
        type=integer_at_least(1),
        metavar="N",
        help="Largest number of sessions that each verifier runs at once (default: 64).",
    )
    add(
        "--queue-limit",
        type=integer_at_least(0),
        metavar="N",
        help="Largest number of requests that wait in each router's queue (default: 256).",
    )
    add(
        "--drain-timeout-s",
        type=number_at_least(0.0),
        metavar="S",
        default=DRAIN_S,
        help=DRAIN_HELP,
    )
    add(
        "--health-timeout-s",
        type=number_at_least(0.0),
        metavar="S",
        default=HEALTH_TIMEOUT_S,
        help=HEALTH_TIMEOUT_HELP,
    )
    add(
        "--journal",
        type=Path,
        metavar="FILE",
        help="Log file from which a restarted router restores resumable requests.",
    )
    add(
        "--threads",
        type=integer_at_least(1),
        metavar="N",
        help="Compute threads of each verifier and drafter (default: chosen automatically).",
    )
    add(
        "--tls-dir",
        type=Path,
        metavar="DIR",
        help="Directory of certificates that `outrider certs DIR` created; enables TLS.",
    )
    add(
        "--api-keys",
        type=Path,
        metavar="FILE",
        help="Key file; clients must send one of its API keys.",
    )
    add(
        "--metrics-port",
        type=integer_at_least(0),
        metavar="P",
        help="Prometheus port of the router; further routers use P+1, P+2, ... (default: none).",
    )
    add(
        "--metrics-compat",
        choices=("vllm",),
        help="Export the router's metrics under the metric names of this server too.",
    )
    add(
        "--tool-call-parser",
        metavar="NAME",
        help="Format in which the model writes tool calls, such as hermes; none: calls are not "
        "read (default: auto, the chat template decides).",
    )
    add(
        "--reasoning-parser",
        metavar="NAME",
        help="Format in which the model writes its reasoning, such as qwen3; none: it is part of "
        "the answer's text (default: auto, the chat template decides).",
    )
    add(
        "--log-level",
        type=str.upper,
        choices=LOG_LEVELS,
        help="Log level of all processes (default: INFO).",
    )
    add(
        "--trace-dir",
        type=Path,
        metavar="DIR",
        help="Directory into which verifiers and drafters write their timelines when they end.",
    )
    for kind in ("verifier", "drafter"):
        add(
            f"--{kind}-hook",
            action="append",
            default=[],
            metavar="MODULE[:KEY=VALUE,...]",
            help=f"Python module to load into each {kind}; may be repeated.",
        )
    add_ray_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM, SIGINT or SIGHUP arrives, and return the exit status.

    Raises OutriderError. Raises SystemExit (143, 130 or 129, in the order of these signals) if a
    signal arrives before the router is started.
    """
    own = ray_flags(args)
    config = make_config(args)
    if args.runtime == "ray":
        for line in check_files(config):
            print_progress(line)
        flags = [*ray_args(config), *own]
        for line in ray_warnings(flags):
            print_progress(line)
        # Ray's launcher is a process of its own: this one imports no Ray.
        return run_module(RAY_MODULE, flags)
    stop, enough = threading.Event(), threading.Event()
    cluster = LocalCluster(config, stop=stop)

    def on_signal(number: int, _frame: FrameType | None) -> None:
        # A router serves before all others are known to be healthy: its requests are drained.
        if CertificateRole.ROUTER in cluster.members:
            (enough if stop.is_set() else stop).set()
        else:
            _give_up(number)

    _on_stop(on_signal)
    with (
        cluster,
        Supervisor(
            cluster.members, print_progress, health_timeout_s=config.health_timeout_s
        ) as supervisor,
    ):
        while not stop.wait(POLL_INTERVAL_S):
            supervisor.look()
        print_progress(
            f"stopping: running requests get {config.drain_timeout_s:g} s to finish; a second "
            "signal ends them"
        )
        supervisor.release(cluster.members[CertificateRole.ROUTER])
        cluster.drain(enough, supervisor.look)
    return 0


def _on_stop(handler: Callable[[int, FrameType | None], None]) -> None:
    for number in stop_signals():
        signal.signal(number, handler)


def _give_up(number: int) -> NoReturn:
    # Another one must not disturb what stops the processes on the way out.
    _on_stop(lambda *_: None)
    print_progress("stopping before all processes were ready")
    raise SystemExit(SIGNAL_EXIT_BASE + number)


def make_config(args: argparse.Namespace) -> LocalFleetConfig:
    """Return the configuration of the processes for the given flags.

    Downloads the model if it is missing. Raises InvalidRequestError (INVALID_FLAG) for flags that
    would have no effect.
    """
    _check_names(args)
    files = find_model(
        args.model, head=args.head, revision=args.revision, head_revision=args.head_revision
    )
    methods = parse_methods(args.drafter_methods, has_head=files.head is not None)
    draft_model = None
    if args.draft_model is not None:
        draft_model = find_model(args.draft_model, revision=args.draft_model_revision).path
    return LocalFleetConfig(
        model=files.path,
        model_name=args.served_model_name or files.name,
        max_model_len=args.max_model_len,
        gpu_memory_utilization=args.gpu_memory_utilization,
        log_level=args.log_level,
        methods=methods,
        head=files.head,
        draft_model=draft_model,
        verifiers=args.verifiers,
        drafters=args.drafters,
        routers=args.routers,
        dtype=args.dtype or "",
        **placement_of(args),
        listen=f"{args.host}:{args.port}",
        http=args.http,
        kv_tokens=args.kv_tokens,
        prefix_cache=not args.no_prefix_cache,
        max_sessions=args.max_sessions,
        queue_limit=args.queue_limit,
        drain_timeout_s=args.drain_timeout_s,
        health_timeout_s=args.health_timeout_s,
        journal=args.journal,
        planner=args.planner,
        look_ahead=args.look_ahead,
        fan_out=args.fan_out,
        threads=args.threads,
        verifier_hooks=tuple(args.verifier_hook),
        drafter_hooks=tuple(args.drafter_hook),
        trace_dir=args.trace_dir,
        metrics_port=args.metrics_port,
        tls_dir=args.tls_dir,
        api_keys=args.api_keys,
        metrics_compat=args.metrics_compat,
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        inherit_logs=True,
    )


def _check_names(args: argparse.Namespace) -> None:
    """Raise InvalidRequestError for an empty served name, or for a revision of a model or head that
    is not given."""
    if args.served_model_name is not None and not args.served_model_name.strip():
        raise InvalidRequestError(
            "--served-model-name must not be empty; without the flag it is the name or hub id of "
            "--model",
            reason="INVALID_FLAG",
        )
    revised = (
        ("--head", args.head, args.head_revision),
        ("--draft-model", args.draft_model, args.draft_model_revision),
    )
    for flag, value, revision in revised:
        if revision is not None and value is None:
            raise InvalidRequestError(
                f"{flag}-revision needs a {flag} from the hub: give {flag} OWNER/NAME too",
                reason="INVALID_FLAG",
            )


def parse_methods(text: str | None, *, has_head: bool) -> tuple[DraftMethod, ...]:
    """Return the draft methods in `text`, the value of --drafter-methods. If `text` is None, return
    the methods that are possible with the given files. `has_head` is whether there is a draft
    head."""
    if text is None:
        own = (DraftMethod.EAGLE3, DraftMethod.NGRAM)
        return own if has_head else (DraftMethod.NGRAM,)
    try:
        methods = tuple(DraftMethod(name.strip()) for name in text.split(",") if name.strip())
    except ValueError:
        allowed = ", ".join(method.value for method in DraftMethod)
        raise InvalidRequestError(
            f"--drafter-methods must be a comma-separated list of {allowed}; got {text!r}",
            reason="INVALID_FLAG",
        ) from None
    return tuple(method for method in methods if method is not DraftMethod.NONE)


def ray_args(config: LocalFleetConfig) -> list[str]:
    """Return the flags of the Ray launcher for this configuration.

    Raises InvalidRequestError for settings that the launcher does not support.
    """
    if config.verifier_hooks or config.drafter_hooks:
        raise InvalidRequestError(
            "--verifier-hook and --drafter-hook need --runtime processes; with Ray, set `hooks` in "
            "[verifier] and [drafter] of the configuration file of `outrider ray`",
            reason="INVALID_FLAG",
        )
    if config.trace_dir is not None:
        raise InvalidRequestError("--trace-dir needs --runtime processes", reason="INVALID_FLAG")
    if config.routers > 1:
        raise InvalidRequestError("--routers needs --runtime processes", reason="INVALID_FLAG")
    if config.metrics_compat is not None:
        raise InvalidRequestError(
            "--metrics-compat needs --runtime processes; with Ray, set metrics_compat in [router] "
            "of the configuration file of `outrider ray`",
            reason="INVALID_FLAG",
        )
    if config.tool_call_parser or config.reasoning_parser:
        raise InvalidRequestError(
            "--tool-call-parser and --reasoning-parser need --runtime processes; with Ray, set "
            "tool_call_parser and reasoning_parser in [router] of the configuration file of "
            "`outrider ray`",
            reason="INVALID_FLAG",
        )
    if config.max_model_len or config.gpu_memory_utilization or config.log_level:
        raise InvalidRequestError(
            "--max-model-len, --gpu-memory-utilization and --log-level need --runtime processes; "
            "with Ray, set them in the configuration file of `outrider ray`",
            reason="INVALID_FLAG",
        )
    if config.health_timeout_s != HEALTH_TIMEOUT_S:
        raise InvalidRequestError(
            "--health-timeout-s needs --runtime processes", reason="INVALID_FLAG"
        )
    if config.tls_dir is not None:
        raise InvalidRequestError(
            "--tls-dir needs --runtime processes; with Ray, set router.client_api_tls in the "
            "configuration file of `outrider ray`",
            reason="INVALID_FLAG",
        )
    values: dict[str, object] = {
        "model": config.model,
        "model-name": config.model_name,
        "head": config.head,
        "draft-model": config.draft_model,
        "verifiers": config.verifiers,
        "drafters": config.drafters,
        "methods": ",".join(config.methods) or DraftMethod.NONE.value,
        "dtype": config.element_type,
        "placement": config.placement,
        "draft-length": config.draft_length,
        "draft-top-k": config.draft_top_k,
        "planner": config.planner,
        "look-ahead": config.look_ahead,
        "fan-out": config.fan_out,
        "simulated-acceptance": config.simulated_acceptance or None,
        "device": config.device,
        "drafter-device": config.drafter_device or None,
        "listen": config.listen,
        "http": config.http,
        "kv-tokens": config.kv_tokens,
        "max-sessions": config.max_sessions,
        "queue-limit": config.queue_limit,
        "api-keys": config.api_keys,
        "drain-timeout-s": config.drain_timeout_s,
        "journal": config.journal,
        "threads": config.threads,
        "busy-polling-cores": config.busy_polling_cores,
        "metrics-port": config.metrics_port,
        "device-exchange": None if config.device_exchange == AUTO else config.device_exchange,
    }
    flags = ((f"--{name}", str(value)) for name, value in values.items() if value is not None)
    switches = [] if config.cuda_graphs else ["--no-cuda-graphs"]
    switches += [] if config.prefix_cache else ["--no-prefix-cache"]
    switches += ["--batch-invariant"] if config.batch_invariant else []
    return [part for flag in flags for part in flag] + switches
