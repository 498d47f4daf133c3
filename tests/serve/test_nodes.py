"""One engine over several nodes: what is refused, who hears of whose end; real ones are in tests/drills/cluster.py."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from lightning_megatron_rl.rollout.servers import nodes as module
from lightning_megatron_rl.rollout.servers.nodes import EngineNodes
from lightning_megatron_rl.serve.command import choose_node_address, main
from tests.distributed import ROOT, free_port
from tests.rollout.server_process import TOKEN

HERE = "127.0.0.1"
OVER = ["MODEL", "--tensor-parallel-size", "4", "--nodes", "2"]
ARGUMENTS = {"tensor_parallel_size": 2, "dtype": "float32", "host": HERE}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (OVER, "--nodes 2 without --node-rank or --master: each node says its own number, from 0, and the address"),
        ([*OVER, "--node-rank", "2", "--master", HERE], "--node-rank 2 must be in [0, 1]: --nodes is 2"),
        (
            [*OVER, "--node-rank", "0", "--master", HERE, "--tensor-parallel-size", "3"],
            "--tensor-parallel-size 3 over --nodes 2: 3 / 2 is no whole number of workers on each node",
        ),
        ([*OVER, "--node-rank", "0", "--master", HERE, "--nodes", "0"], "--nodes 0: an engine over several nodes has"),
        ([*OVER, "--node-rank", "0", "--master", HERE, "--master-port", "65535"], "--master-port 65535 must be in"),
        ([*OVER, "--node-rank", "0", "--master", "10.77.8.9"], "listens on 127.0.0.1, and --master is 10.77.8.9"),
        (["MODEL", "--node-rank", "1"], "--node-rank or --master without --nodes"),
    ],
)
def test_nodes_that_cannot_share_an_engine_are_refused(arguments, words, qwen3_dir, capsys, monkeypatch):
    monkeypatch.setenv("LIGHTNING_MEGATRON_RL_TOKEN", TOKEN)
    assert main([str(qwen3_dir) if it == "MODEL" else it for it in arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("rank", [0, 1])
def test_nodes_may_be_named_by_their_hosts(rank):
    """vLLM's processes and the interface of gloo are told addresses."""
    assert choose_node_address("localhost", EngineNodes(2, rank, HERE, 29600)) == HERE


def wait_until(reached: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def free_ports() -> int:
    """A free port with another one behind it, which nodes hear of each other by."""
    while True:
        port = free_port()
        with socket.socket() as behind, suppress(OSError):
            behind.bind((HERE, port + 1))
            return port


@pytest.fixture
def two():
    port = free_ports()
    return [EngineNodes(2, rank, HERE, port) for rank in (0, 1)]


def test_each_node_hears_when_another_is_gone(two):
    lost: list[list[str]] = [[], []]
    first = two[0].join(TOKEN, "model", ARGUMENTS | {"headless": False}, lost[0].append)
    second = two[1].join(TOKEN, "model", ARGUMENTS | {"host": "10.1.1.1", "headless": True}, lost[1].append)
    wait_until(lambda: first.present == [1])
    assert lost == [[], []]
    second.stop()
    wait_until(lambda: lost[0])
    assert "rank 1 on host with --node-rank 1 has ended or was killed" in lost[0][0]
    first.stop()
    assert lost[1] == []  # it ended by itself


@pytest.mark.parametrize(
    "other", [("another-token", "model", ARGUMENTS), (TOKEN, "other", ARGUMENTS), (TOKEN, "model", {"dtype": "auto"})]
)
def test_another_token_model_or_setting_is_not_let_in(two, other):
    lost: list[list[str]] = [[], []]
    first = two[0].join(TOKEN, "model", ARGUMENTS, lost[0].append)
    second = two[1].join(*other, lost[1].append)
    wait_until(lambda: lost[1])
    assert lost[0] == []
    assert first.present == []
    for presence in (first, second):
        presence.stop()


def test_a_node_0_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(module, "JOIN_S", 0.5)
    monkeypatch.setattr(module, "AGAIN_S", 0.1)
    with socket.socket() as held:
        held.bind((HERE, 0))  # and does not listen: nobody else's server can come to that port meanwhile
        port = held.getsockname()[1]
        nodes = EngineNodes(2, 1, HERE, port - 1)
        with pytest.raises(RuntimeError, match=re.escape(f"cannot reach rank 0 on {HERE} at {HERE}:{port}")):
            nodes.join(TOKEN, "model", ARGUMENTS, lambda told: None)


def test_vllm_gets_the_interface_of_the_address(two):
    assert two[0].environment(HERE, {}) == {"VLLM_HOST_IP": HERE, "GLOO_SOCKET_IFNAME": "lo"}
    assert two[0].environment(HERE, {"GLOO_SOCKET_IFNAME": "ib0"})["GLOO_SOCKET_IFNAME"] == "ib0"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_waits_for_node_0_ends_at_once(qwen3_dir, number):
    line = [sys.executable, "-m", "lightning_megatron_rl", "serve", str(qwen3_dir), "--tensor-parallel-size", "2"]
    line += ["--nodes", "2", "--node-rank", "1", "--master", HERE, "--master-port", str(free_port())]
    variables = {**os.environ, "LIGHTNING_MEGATRON_RL_TOKEN": TOKEN, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        line, cwd=ROOT, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        said = ""
        while "sharing" not in said:
            said += (line_ := process.stdout.readline())
            assert line_, said
        process.send_signal(number)
        rest = process.stdout.read()
        assert process.wait(20) in (128 + number, -number)
        assert "Traceback" not in rest
