"""``lightning-megatron-rl serve``: vLLM's server with a guard before every route, and ours to receive weights."""

import argparse
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from ipaddress import ip_address
from types import FrameType
from typing import TYPE_CHECKING, Any

from lightning_megatron_rl.utilities.arguments import new_parser

if TYPE_CHECKING:
    from lightning_megatron_rl.parallel.presence import Presence
    from lightning_megatron_rl.rollout.servers.nodes import EngineNodes
    from lightning_megatron_rl.rollout.vllm.engine import VLLMEngine

PROGRAM = "lightning-megatron-rl serve"
GRACE_S = 20.0  # between SIGTERM and SIGKILL
_EVERYWHERE = (0, int(ip_address("::ffff:0.0.0.0")))  # the latter all of IPv4, as IPv6 has it
_DESCRIPTION = """\
Serve a model for trainers on other hosts (engine: VLLMServers).

The token comes from --token-file, or from the variable LIGHTNING_MEGATRON_RL_TOKEN. Make one with
  python -c "import secrets; print(secrets.token_urlsafe(32))" > token; chmod 600 token
The server listens on the loopback interface unless --host or --interface names another one.

A model that is larger than a node: run the same command on each of --nodes nodes, with its own --node-rank, and
--master the address of node 0, which has the server. --tensor-parallel-size is that of all nodes together."""
_EPILOG = """exit code: 2 for arguments that cannot be, 128 plus the signal's number if one ended it.

example:
  lightning-megatron-rl serve runs/demo/model --interface eth0 --token-file token --max-model-len 64"""


def make_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = new_parser(PROGRAM, _DESCRIPTION, _EPILOG)
    parser.add_argument("model", help="Hugging Face model directory, of the kind that the trainer trains")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    place.add_argument("--interface", help="network interface to listen on, such as eth0 or ib0")
    parser.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    parser.add_argument("--token-file", help="file with the token, readable by its owner alone")
    parser.add_argument("--all-interfaces", action="store_true", help="allow --host 0.0.0.0")
    parser.add_argument("--max-model-len", type=int, default=2048, help="prompt and response (default: %(default)s)")
    parser.add_argument("--max-num-seqs", type=int, default=256, help="sampled at a time (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--kv-cache-memory-gb", type=float, help="GiB; unset: 0.5 on a CPU, a share of a GPU's memory")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9, help="that share (default: %(default)s)")
    parser.add_argument("--enforce-eager", action="store_true", help="on GPUs, no compilation and no CUDA graphs")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs that share the model, on all nodes")
    parser.add_argument("--nodes", type=int, default=1, help="nodes that share the model (default: %(default)s)")
    parser.add_argument("--node-rank", type=int, help="number of this node, from 0: needed with --nodes")
    parser.add_argument("--master", help="name or address of node 0: needed with --nodes")
    parser.add_argument(
        "--master-port", type=int, default=29600, help="of node 0, and the next one (default: %(default)s)"
    )
    parser.add_argument("--num-threads", type=int, help="CPU threads of each process")
    parser.add_argument("--vllm-args", type=json_object, default={}, help="other arguments of vLLM's, as JSON")
    return parser


def json_object(text: str) -> dict[str, Any]:
    """Return the object that JSON has.

    Raises:
        ArgumentTypeError: It is none.
    """
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON ({error}): give '{{\"name\": value}}'") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object: give '{{\"name\": value}}'")
    return found


def read_token(path: str | None, environment: Mapping[str, str]) -> str:
    """Return the server's token.

    Raises:
        ValueError: There is none, it cannot be one, or others can read its file.
    """
    from lightning_megatron_rl.rollout.servers.shared_token import TOKEN_VARIABLE, check_token, read_token_file

    how = f'python -c "import secrets; print(secrets.token_urlsafe(32))" > {path or "token"}'
    if path is None:
        token, where = environment.get(TOKEN_VARIABLE, ""), TOKEN_VARIABLE
    else:
        token, where = read_token_file(path, "--token-file"), path
    if not token.strip():
        raise ValueError(f"no token in {where}: without one anybody could change the weights. Make one: {how}")
    return check_token(token, where, f"Make one: {how}")


def choose_address(host: str, interface: str | None, *, everywhere: bool) -> str:
    """Return where to listen.

    Raises:
        ValueError: Everywhere without `everywhere`, or no such interface.
    """
    if interface is not None:
        import psutil

        found = psutil.net_if_addrs()
        addresses = [a.address for a in found.get(interface, []) if a.family == socket.AF_INET]
        if not addresses:
            raise ValueError(f"--interface {interface} has no IPv4 address here; there are {', '.join(sorted(found))}")
        return addresses[0]
    if not everywhere and is_everywhere(host):
        raise ValueError(
            f"--host {host!r} listens on all interfaces of this machine, public ones among them: name the cluster's"
            " interface (--interface eth0) or its address, or say --all-interfaces."
        )
    return host


def is_everywhere(host: str) -> bool:
    """Whether a host stands for all interfaces of this machine, such as 0.0.0.0, 0 and ::."""
    with suppress(OSError):  # a name that is unknown here
        found = {ip_address(str(entry[4][0])) for entry in socket.getaddrinfo(host or "::", None)}
        return any(int(address) in _EVERYWHERE for address in found)
    return False


def make_engine(options: argparse.Namespace) -> "VLLMEngine":
    """Return the settings of vLLM.

    Raises:
        ValueError: An argument is outside its range.
    """
    from lightning_megatron_rl.rollout.vllm.engine import VLLMEngine

    if not 0 < options.port < 2**16:
        raise ValueError(f"--port {options.port} must be in [1, 65535]: trainers are told its number")
    return VLLMEngine(
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        dtype=options.dtype,
        device=options.device,
        kv_cache_memory_gb=options.kv_cache_memory_gb,
        gpu_memory_utilization=options.gpu_memory_utilization,
        enforce_eager=options.enforce_eager or None,  # unset, it is so on a CPU
        tensor_parallel_size=options.tensor_parallel_size,
        num_threads=options.num_threads,
        vllm_args=options.vllm_args,
    )


def make_nodes(options: argparse.Namespace) -> "EngineNodes | None":
    """Return the nodes that share the engine; None if this one has it alone.

    Raises:
        ValueError: They cannot, or an argument is missing.
    """
    if options.nodes == 1:
        if options.node_rank or options.master is not None:
            raise ValueError("--node-rank or --master without --nodes: say how many nodes share the model")
        return None
    from lightning_megatron_rl.rollout.servers.nodes import EngineNodes, address_of

    if options.node_rank is None or options.master is None:
        raise ValueError(
            f"--nodes {options.nodes} without --node-rank or --master: each node says its own number, from 0, and the"
            " address of node 0"
        )
    nodes = EngineNodes(options.nodes, options.node_rank, address_of(options.master), options.master_port)
    nodes.check_size(options.tensor_parallel_size)
    return nodes


def choose_node_address(address: str, nodes: "EngineNodes") -> str:
    """Return the address by which the other nodes reach this one.

    Args:
        address: As `choose_address` has returned it.
        nodes: That share the engine.

    Raises:
        ValueError: It is this host's alone, or not that of --master on node 0.
        OSError: There is no way to node 0.
    """
    from lightning_megatron_rl.parallel.hosts import is_loopback, own_address

    with suppress(OSError):  # of a name; --master's is resolved so
        address = socket.gethostbyname(address)
    if nodes.rank > 0:
        return own_address(nodes.master, nodes.port) if is_loopback(address) else address
    if address != nodes.master:
        raise ValueError(
            f"--node-rank 0 listens on {address}, and --master is {nodes.master}: name the interface of that address"
            " (--interface eth0), or give --master this host's"
        )
    return address


def check_listening(address: str, port: int) -> str:
    """Return the URL of a server, whose port is free here: vLLM looks when it has taken its time to start.

    Raises:
        OSError: It cannot listen there.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    place = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    try:
        socket.create_server((address, port), family=family).close()
    except OSError as error:
        why = str(error.strerror).partition(" (while")[0]  # the address is said already
        raise OSError(
            f"cannot listen on {place} ({why}): give a free --port (`ss -ltnp` says who has this one) and an"
            " address of this host (`ip -brief address`)"
        ) from error
    return f"http://{place}"


def run_server(
    arguments: dict[str, Any],
    environment: dict[str, str],
    join: "Callable[[Callable[[str], None]], Presence] | None" = None,
) -> int:
    """Run vLLM's server until it ends, or a signal comes; nothing of it is left afterwards. Returns an exit code.

    Args:
        arguments: Of the server.
        environment: As well.
        join: Connects the nodes of an engine over several, and is given what hears that one is gone.
    """
    from lightning_megatron_rl.rollout.servers.launch import LOOK_S, Server

    told: list[int] = []
    lost: list[str] = []

    def note(number: int, frame: FrameType | None) -> None:
        told.append(number)

    presence = join(lost.append) if join is not None else None  # may wait for node 0: signals end this process at once
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, note)
    server = Server(arguments, environment)
    try:
        while server.is_running and not told and not lost:
            time.sleep(LOOK_S)
        if told:
            server.ask_to_end()
            server.wait(GRACE_S)
    finally:
        code = server.end()  # at once if a node is gone: workers that wait for its would wait long
        if presence is not None:
            presence.stop()
    if lost and not told:
        print(
            f"{PROGRAM}: error: {lost[0]}. An engine over several nodes ends with each of them; one with another token,"
            " version, model or setting is not let in.",
            file=sys.stderr,
        )
        return 1
    return 128 + told[0] if told else code


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    from lightning_megatron_rl.rollout.servers.about import fingerprint
    from lightning_megatron_rl.rollout.servers.guard import token_digest
    from lightning_megatron_rl.rollout.servers.launch import server_settings

    options = make_parser().parse_args(arguments)
    try:
        address = choose_address(options.host, options.interface, everywhere=options.all_interfaces)
        token = read_token(options.token_file, os.environ)
        engine, nodes = make_engine(options), make_nodes(options)
        if nodes is not None:
            address = choose_node_address(address, nodes)
        inherited = {name: value for name, value in os.environ.items() if value.strip() != token}
        vllm_arguments, environment = server_settings(
            options.model, engine, (address, options.port), token_digest(token), inherited, nodes
        )
        serves = nodes is None or nodes.rank == 0
        url = check_listening(address, options.port) if serves else ""
    except (ValueError, RuntimeError, OSError) as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    try:
        where = (
            f"serving {options.model} on {url}" if serves else f"sharing {options.model} with node 0, {options.master}"
        )
        print(where, flush=True)
        join = None if nodes is None else partial(nodes.join, token, fingerprint(options.model), vllm_arguments)
        code = run_server(vllm_arguments, environment, join)
    except (RuntimeError, OSError) as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before anything was started
        return 128 + signal.SIGINT
    if code > 128 and code - 128 in (signal.SIGTERM, signal.SIGINT):
        return code
    print(f"{PROGRAM}: the server has ended with {code}: what it printed last says why", file=sys.stderr)
    return code or 1
