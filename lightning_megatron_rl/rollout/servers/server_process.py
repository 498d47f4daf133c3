"""The process of vLLM's server (`python -m`): its arguments come on standard input, its guard's in the environment."""

import asyncio
import json
import os
import signal
import sys
import threading
import time

from lightning_megatron_rl.rollout.servers.process_group import end_group
from lightning_megatron_rl.utilities.garbage import collect_rarely

GUARD = "lightning_megatron_rl.rollout.servers.guard.Guard"
LOOK_S = 1.0
STREAM_INTERVAL = 8  # tokens of a response in a message; with one in each, messages keep a core busy here and there
GRACE_S = 5  # for calls under way when the engine is gone: vLLM's server would wait for them for ever


def end_with(parent_pid: int) -> None:
    """End this process's group when its parent ends; a death signal would end this process alone, and orphan others."""

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(LOOK_S)
        end_group(os.getpgid(0), set())

    threading.Thread(target=watch, daemon=True).start()


def main(parent_pid: int) -> None:
    """Serve, or work for a server on another node, until a signal comes."""
    end_with(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    settings = json.load(sys.stdin)

    from vllm.entrypoints.cli.serve import run_headless
    from vllm.entrypoints.openai.api_server import run_server
    from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    unknown = [name for name in settings if name not in vars(arguments)]
    assert not unknown, unknown
    for name, value in settings.items():
        setattr(arguments, name, value)
    arguments.middleware = [GUARD]
    arguments.stream_interval = STREAM_INTERVAL
    arguments.served_model_name = ["policy"]
    arguments.disable_log_stats = True
    arguments.disable_uvicorn_access_log = True
    validate_parsed_serve_args(arguments)
    if arguments.headless:  # workers of an engine whose server is on another node
        arguments.api_server_count = 0
        run_headless(arguments)
    else:
        asyncio.run(run_server(arguments, timeout_graceful_shutdown=GRACE_S))


if __name__ in ("__main__", "__mp_main__"):  # the latter: vLLM's engine and workers, which multiprocessing starts
    collect_rarely()
if __name__ == "__main__":
    main(int(sys.argv[1]))
