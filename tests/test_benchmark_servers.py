"""B1 with samplers on other GPUs than the trainer's: what goes over a link, what a row says, and a run with servers."""

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_megatron_rl.rollout.servers.engine import VLLMServers
from tests.test_benchmarks import run_benchmark, tables  # which finds the benchmarks' modules

servers: Any = importlib.import_module("servers")
weight_sync: Any = importlib.import_module("weight_sync")


def test_what_goes_over_a_link_by_hand():
    def sent(samplers: int, trainer: int) -> float:
        side = {"sync": {"bytes": 10}, "samplers_elsewhere": samplers, "trainer_devices": trainer}
        return weight_sync.bytes_over_a_link(side)

    assert sent(1, 1) == 10  # an engine on another GPU, or one server
    assert sent(2, 1) == 20  # one rank sends to both
    assert sent(2, 2) == 10
    assert sent(1, 2) == 10  # the server's own link
    assert weight_sync.bytes_over_a_link({"sync": {"bytes": 10, "peer_bytes": 3}}) == 3
    assert weight_sync.bytes_over_a_link({"sync": {"bytes": 10}}) == 0


@pytest.mark.parametrize(
    ("count", "over", "direct", "warnings", "share", "name"),
    [
        (1, "nccl", {}, [], False, "1 server over NCCL"),
        (2, "nccl", {}, ["something else"], True, "2 servers over NCCL (sockets: processes share a GPU)"),
        (2, "nccl", {}, ["weights go to a over gloo, since"], True, "2 servers over gloo, since NCCL did not connect"),
        (2, "nccl", None, [], False, "2 servers over gloo in buckets"),
        (2, "gloo", {}, [], False, "2 servers over gloo"),
    ],
)
def test_a_row_says_what_weights_went_over(count, over, direct, warnings, share, name):
    side = {"sync": {"direct": direct}, "warnings": warnings}
    assert weight_sync.place_of_servers(count, over, side, share=share) == name


def test_a_row_says_what_buckets_it_has_and_the_default_is_the_engines():
    assert weight_sync.buckets_of(1024) == ", buckets of 1,024 MiB"
    assert weight_sync.buckets_of(VLLMServers(["http://a:1"], max_model_len=8).bucket_mb) == ""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sleep_level": 2}, "2 is for grpo_step.py"),
        ({"apart": True, "servers": 1}, "give one of them"),
        ({"apart": True, "in_process": True}, "or elsewhere, not both"),
        ({"weights_over": "nccl"}, "is for servers"),
        ({"bucket_mb": 1024}, "--bucket-mb 1024 is for servers"),
        ({"weight_transfer": "ipc"}, "is for --apart"),
        ({"servers": 2, "peer": "trl"}, "--peer none"),
        ({"servers": 2, "sampler_parallel": 2}, "a server has one GPU"),
        ({"apart": True, "device": "cpu"}, "take --servers 1"),
        ({"apart": True, "devices": 2}, "each replica"),
        (
            {"apart": True, "devices": 9, "tensor_parallel": 3, "context_parallel": 3},
            r"9 GPU\(s\) .* \+ 1 of the sampler = 10",
        ),
    ],
)
def test_a_sampler_elsewhere_beside_other_settings_is_refused(given, message):
    plain = {"apart": False, "servers": 0, "weights_over": None, "peer": "none", "eager": False, "device": "cuda"}
    plain |= {
        "devices": 1,
        "tensor_parallel": 1,
        "context_parallel": 1,
        "sampler_parallel": 1,
        "weight_transfer": "auto",
    }
    plain |= {"sleep_level": 0, "in_process": False, "bucket_mb": weight_sync.BUCKET_MB}
    weight_sync.check_place(SimpleNamespace(**plain))
    with pytest.raises(ValueError, match=message):
        weight_sync.check_place(SimpleNamespace(**{**plain, **given}))


def test_servers_have_the_gpus_behind_the_trainers():
    assert servers.choose_gpus(["4", "5", "6"], 1, 2) == ["5", "6"]
    assert servers.choose_gpus(["4", "5"], 1, 2) == ["5", "5"]
    assert servers.choose_gpus(["4"], 1, 2) == ["4", "4"]


@pytest.mark.slow
@pytest.mark.deadline(250)
def test_a_server_that_cannot_start_is_told_of(tmp_path):
    starting = servers.serve(tmp_path, ["--device=cpu"], [], trainer=1, servers=2, timeout_s=200)
    with pytest.raises(RuntimeError, match=r"ended with 2:\n[\s\S]*error: "), starting:
        pass


def test_a_row_of_a_sampler_elsewhere_says_so(tmp_path):
    result = json.loads((tables.RESULTS / "weight_sync_h200_8b.json").read_text())
    result["ours"]["place"] = "engine on another GPU"
    result["rates"]["ours"]["limited_by"] = "links between GPUs"
    (tmp_path / "weight_sync_a.json").write_text(json.dumps(result))
    cells = tables.weight_sync(tmp_path).splitlines()[2].split(" | ")
    assert cells[2] == "lightning-megatron-rl, engine on another GPU"
    assert cells[6].endswith("% (of links between GPUs)")
    assert "GB/s, engine on another GPU |" in tables.headline(tmp_path)
    assert "(8b, H200, engine on another GPU)" in tables.goals(tmp_path)


@pytest.mark.slow
@pytest.mark.deadline(500)  # two servers start beside each other
def test_sync_to_servers_runs_on_a_cpu(tmp_path: Path):
    out = tmp_path / "result.json"
    sizes = ["--steps=1", "--warmup=0", "--prompts=2", "--generations=2", "--prompt-tokens=4", "--response-tokens=4"]
    run_benchmark("weight_sync.py", *sizes, "--servers=2", "--out", str(out), timeout=480)
    result = json.loads(out.read_text())
    assert result["ours"]["place"] == "2 servers over gloo"
    assert result["ours"]["sync"]["direct"]["num_bytes"] == pytest.approx(2 * result["ours"]["sync"]["bytes"], rel=0.01)
    assert max(result["ours"]["mismatch"]) < 1e-3  # the weights arrived
