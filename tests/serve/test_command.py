"""What `serve` refuses before anything is loaded; real servers are in tests/rollout/test_servers.py."""

import os
import socket

import pytest

from lightning_megatron_rl.rollout.servers import launch
from lightning_megatron_rl.rollout.servers.process_group import members, shared_files
from lightning_megatron_rl.serve import command
from lightning_megatron_rl.serve.command import (
    check_listening,
    choose_address,
    main,
    make_engine,
    make_parser,
    read_token,
)
from tests.rollout.server_process import TOKEN


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "0", "0.0", "::0", "::ffff:0.0.0.0"])
def test_all_interfaces_must_be_said(host):
    with pytest.raises(ValueError, match=r"listens on all interfaces of this machine.*--interface eth0"):
        choose_address(host, None, everywhere=False)
    assert choose_address(host, None, everywhere=True) == host


def test_interface_gives_its_address():
    assert choose_address("", "lo", everywhere=False) == "127.0.0.1"
    with pytest.raises(ValueError, match=r"--interface nosuch0 has no IPv4 address here; there are .*lo"):
        choose_address("", "nosuch0", everywhere=False)


def test_token_is_needed_long_and_private(tmp_path):
    file = tmp_path / "token"
    file.write_text("short\n")
    file.chmod(0o600)
    with pytest.raises(ValueError, match="has 5 characters: at least 16"):
        read_token(str(file), {})
    file.write_text(f"{TOKEN}\n")
    assert read_token(str(file), {}) == TOKEN
    file.chmod(0o640)
    with pytest.raises(ValueError, match=r"can be read by others: chmod 600"):
        read_token(str(file), {})
    with pytest.raises(ValueError, match=r"no token in LIGHTNING_MEGATRON_RL_TOKEN: without one anybody could"):
        read_token(None, {})
    for found in (TOKEN, f"{TOKEN}\n"):
        assert read_token(None, {"LIGHTNING_MEGATRON_RL_TOKEN": found}) == TOKEN


@pytest.mark.parametrize("end", ["", "\n"])
def test_processes_of_the_server_do_not_know_the_token(qwen3_dir, monkeypatch, end):
    """As a secret of a cluster may have it: with the line's end."""
    monkeypatch.setenv("LIGHTNING_MEGATRON_RL_TOKEN", f"{TOKEN}{end}")
    monkeypatch.setattr(command, "check_listening", lambda address, port: f"http://{address}:{port}")
    given: list[dict[str, str]] = []
    monkeypatch.setattr(command, "run_server", lambda arguments, environment, join: given.append(environment) or 1)
    main([str(qwen3_dir)])
    assert not any(TOKEN in value for value in given[0].values())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no-such-directory"], "no-such-directory is no Hugging Face model directory"),
        (["MODEL", "--port", "70000"], "--port 70000 must be in [1, 65535]"),
        (["MODEL", "--port", "0"], "--port 0 must be in [1, 65535]"),
        (["MODEL", "--host", "192.0.2.1"], "cannot listen on 192.0.2.1:8000"),
        (["MODEL", "--max-num-seqs", "0"], "engine.max_num_seqs=0 must be at least 1"),
        (["MODEL", "--host", "0.0.0.0"], "listens on all interfaces"),
        (["MODEL", "--vllm-args", '{"model": "x"}'], "model"),
        (["MODEL", "--token-file", "no-such-file"], "--token-file names 'no-such-file', and there is no such file"),
    ],
)
def test_bad_input_ends_with_2_and_a_line(arguments, words, qwen3_dir, capsys, monkeypatch):
    monkeypatch.setenv("LIGHTNING_MEGATRON_RL_TOKEN", TOKEN)
    assert main([str(qwen3_dir) if it == "MODEL" else it for it in arguments]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("lightning-megatron-rl serve: error: ")
    assert words in printed


@pytest.mark.parametrize("text", ['{"max_logprobs": 1', "[1]", "3"])
def test_vllm_args_are_a_json_object(text, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["model", "--vllm-args", text])
    assert ended.value.code == 2
    assert f"argument --vllm-args: {text!r} is no JSON" in capsys.readouterr().err


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_a_port_that_is_taken_is_named_before_anything_loads(host, shown, qwen3_dir, capsys, monkeypatch):
    monkeypatch.setenv("LIGHTNING_MEGATRON_RL_TOKEN", TOKEN)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as taken:
        port = taken.getsockname()[1]
        assert main([str(qwen3_dir), "--host", host, "--port", str(port)]) == 2
    assert f"cannot listen on {shown}:{port} (Address already in use): give a free --port" in capsys.readouterr().err
    assert check_listening(host, port) == f"http://{shown}:{port}"


def test_a_key_of_vllms_own_does_not_keep_the_trainer_out(qwen3_dir):
    """vLLM asks for it where responses are asked for, and nowhere else: the server would be taken, and lost."""
    engine = make_engine(make_parser().parse_args([str(qwen3_dir)]))
    _, environment = launch.server_settings(
        str(qwen3_dir), engine, ("127.0.0.1", 8000), "digest", {"VLLM_API_KEY": "of another server"}
    )
    assert not environment["VLLM_API_KEY"]


@pytest.mark.parametrize(("options", "eager"), [([], False), (["--enforce-eager"], True)])
def test_gpus_record_graphs_unless_told_not_to(options, eager, qwen3_dir, monkeypatch):
    monkeypatch.setattr(launch, "choose_device", lambda *_, **__: "cuda")
    engine = make_engine(make_parser().parse_args([str(qwen3_dir), *options]))
    arguments, _ = launch.server_settings(str(qwen3_dir), engine, ("127.0.0.1", 8000), "digest", {})
    assert arguments["enforce_eager"] is eager


def test_a_server_on_a_part_of_the_gpus_processors_is_refused(qwen3_dir, monkeypatch):
    monkeypatch.setattr(launch, "choose_device", lambda *_, **__: "cuda")
    engine, part = make_engine(make_parser().parse_args([str(qwen3_dir)])), {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"}
    with pytest.raises(ValueError, match="CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50"):
        launch.server_settings(str(qwen3_dir), engine, ("127.0.0.1", 8000), "digest", part)


def test_members_of_a_group_are_its_processes():

    assert os.getpid() in set(members(os.getpgid(0)))
    assert all(path.parent.name == "shm" for path in shared_files(os.getpgid(0)))
