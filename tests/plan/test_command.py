"""The command `plan` on configs of the repository: what it says, what it refuses, and that its overlays are right."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml

from lightning_megatron_rl.plan.command import main
from lightning_megatron_rl.planner.memory import PROCESS_BYTES
from lightning_megatron_rl.planner.moments import GIB
from tests.command_line import ROOT, changed

GRPO = ROOT / "configs" / "recipes" / "qwen3-8b" / "grpo.yaml"


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Lightning sets variables when it is imported."""
    with patch.dict(os.environ):
        yield


def plan(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, dict[str, Any]]:
    code = main([*map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    with pytest.raises(SystemExit) as exit_:
        main([*map(str, arguments)])
    assert exit_.value.code == 2
    return capsys.readouterr().err


def test_plan_says_what_each_phase_holds_and_takes(capsys, tmp_path: Path):
    config = changed(GRPO, tmp_path / "two.yaml", "model.init_args.updates_per_rollout", 2)
    code, found = plan(capsys, "--config", config)
    assert code == 0
    assert found["fits"]
    (stage,) = found["stages"]
    phases = stage["phases"]
    assert list(phases) == ["sampling", "sync", "log-probs", "update", "save"]
    assert phases["sampling"]["gradients"] == phases["sampling"]["activations"] == 0  # offloaded; nothing is computed
    assert phases["update"]["cache"] == 0  # it sleeps
    assert phases["update"]["activations"] > phases["log-probs"]["activations"] > 0
    # 8.19e9 parameters over TP 2: 2 bytes of weights, 4 of gradients, 12 / 4 of optimizer state
    half = 8_190_735_360 / 2 / 2**30
    assert phases["update"]["parameters"] == pytest.approx(2 * half, rel=1e-6)
    assert phases["update"]["gradients"] == pytest.approx(4 * half, rel=1e-6)
    assert phases["update"]["optimizer"] == pytest.approx(3 * half, rel=1e-6)
    for row in phases.values():
        assert sum(row.values()) == pytest.approx(found["free_gib"], rel=1e-6)
    assert found["step_seconds"] == pytest.approx(sum(item["seconds"] for item in found["seconds"]))
    assert {item["link"] for item in found["traffic"]} == {"GPUs of a machine", "host memory"}
    assert any("num_attention_heads 32 / tp 2 = 16" in line for line in found["divisibility"])


def test_a_single_update_has_no_pass_for_log_probs(capsys):
    _, found = plan(capsys, "--config", GRPO)
    assert list(found["stages"][0]["phases"]) == ["sampling", "sync", "update", "save"]
    assert "log-probs" not in [item["phase"] for item in found["seconds"]]


def test_more_nodes_send_gradients_over_the_network(capsys):
    _, found = plan(capsys, "--config", GRPO, "--nodes", "2")
    links = {item["what"]: item["link"] for item in found["traffic"]}
    assert links["gradients and parameters"] == "network"
    assert links["tensor parallelism"] == "GPUs of a machine"


def test_a_pool_of_servers_takes_room_for_messages_and_is_not_planned(capsys, tmp_path: Path):
    servers = {"class_path": "VLLMServers", "init_args": {"urls": [f"http://node-{n}:1" for n in range(5)]}}
    config = changed(GRPO, tmp_path / "servers.yaml", "model.init_args.engine", servers)
    fixed = ["--model.train.max_tokens_per_microbatch", "8192", "--model.train.recompute", "full"]
    _, found = plan(capsys, "--config", config, *fixed)
    buffers = found["stages"][0]["phases"]["update"]["buffers"]
    assert buffers == pytest.approx(PROCESS_BYTES / GIB + 2 * 0.25)  # two of five servers for each of four replicas
    main(["--config", str(config), *fixed])
    assert "samplers: 5 server(s), whose memory and time are not planned" in capsys.readouterr().out


def test_plan_that_does_not_fit_names_the_smallest_change(capsys, tmp_path: Path):
    config = changed(GRPO, tmp_path / "grpo.yaml", "model.init_args.train.max_tokens_per_microbatch", 32_768)
    config = changed(config, tmp_path / "whole.yaml", "model.init_args.train.recompute", "none")
    code, found = plan(capsys, "--config", config)
    assert code == 1
    assert not found["fits"]
    change = found["change"]
    assert change.startswith("train.max_tokens_per_microbatch=")
    value = int(change.partition("=")[2])
    assert plan(capsys, "--config", config, "--model.train.max_tokens_per_microbatch", str(value))[0] == 0
    assert plan(capsys, "--config", config, "--model.train.max_tokens_per_microbatch", str(2 * value))[0] == 1
    assert main(["--config", str(config)]) == 1
    said = capsys.readouterr()
    assert "Does not fit" in said.out
    assert "What lowers it, the largest part first" in said.err
    assert f"The smallest change that fits: {change}" in said.err


@pytest.mark.slow
def test_search_proposes_overlays_that_fit_and_are_what_it_says(capsys, tmp_path: Path):
    assert main(["--config", str(GRPO), "--device", "h200", "--search", "--out", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    seconds = [item["step_seconds"] for item in found]
    assert seconds == sorted(seconds)
    assert len({item["layout"] for item in found}) == 3
    for number, item in enumerate(found, 1):
        overlay = tmp_path / f"layout-{number}.yaml"
        assert yaml.safe_load(overlay.read_text()) == item["overlay"]
        code, again = plan(capsys, "--config", GRPO, "--config", overlay, "--device", "h200")
        assert code == 0
        assert again["layout"] == item["layout"]
        assert again["step_seconds"] == pytest.approx(item["step_seconds"])
        assert again["needed_gib"] == pytest.approx(item["needed_gib"])


@pytest.mark.slow
def test_overlays_have_all_gpus_of_a_node_with_more_than_eight(capsys):
    """The data sheets' machines have eight."""
    twelve = ["--trainer.devices", "12", "--data.batch_size", "96"]
    assert main(["--config", str(GRPO), *twelve, "--search", "--json"]) == 0
    for item in json.loads(capsys.readouterr().out):
        assert item["gpus"] == 12
        assert (item["overlay"]["trainer"]["devices"], item["overlay"]["trainer"]["num_nodes"]) == (12, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "h10"], "unknown device 'h10'; nearest: h100"),
        (["--model.model", "Qwen/Qwen3-9B"], "unknown model 'Qwen/Qwen3-9B'.*nearest: .*Qwen/Qwen3-"),
        (["--respons_tokens", "8"], "plan: error: unknown option --respons_tokens; did you mean --response-tokens"),
        (["--devices", "0"], "--devices 0: it is a number, at least 1"),
        (["--response-tokens", "9000"], "responses of 9000 tokens to plan with > sampling.max_tokens = 4096"),
        (["--prompt-tokens", "513"], "prompts of 513 tokens to plan with > engine.max_model_len - sampling.max_tokens"),
        (["--trainer.strategy", "ddp"], "trainer.strategy=ddp: plans are for MegatronStrategy"),
        (["--out", "x"], "--out x without --search"),
        (["--search", "--out", __file__], r"--out=.*test_command.py' cannot be written: .* directory"),
        (["--devices", "5"], r"tp\(2\) x pp\(1\) x cp\(1\) = 2 does not divide the world size 5"),
        (["--data.batch_size", "63"], "data.batch_size=63 over 4 data-parallel replicas: 63 % 4 = 3"),
        (["--model.train.max_tokens_per_microbatch", "4400"], "_microbatch=4400 < engine.max_model_len=4608"),
        (["--model.engine.gpu_memory_utilization", "0.1"], "cache holds 4249 tokens, engine.max_model_len"),
        (["--model.engine.gpu_memory_utilization", "0.1", "--trainer.precision", "32-true"],
         "cache holds 4249 tokens"),  # a sampler has the checkpoint's 16 bits
        (["--trainer.strategy.sequence_parallel", "true", "--trainer.strategy.tensor_model_parallel_size", "1"],
         "sequence_parallel=True with tensor_model_parallel_size=1"),
    ],
)  # fmt: skip
def test_bad_input(arguments: list[str], message: str, capsys):
    said = refused(capsys, "--config", GRPO, *arguments)
    assert re.search(message, said), said
    assert len(said.splitlines()) <= 3
