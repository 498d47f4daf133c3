"""The benchmarks' own arithmetic, that each runs on a CPU, and that the documents say what the results say."""

import argparse
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.command_line import ROOT
from tests.distributed import CHILD_PATH

sys.path.insert(0, str(ROOT / "benchmarks"))
sys.path.insert(0, str(ROOT / "scripts"))
floor: Any = importlib.import_module("floor")
work_done: Any = importlib.import_module("work_done")
response_lengths: Any = importlib.import_module("response_lengths")
tables: ModuleType = importlib.import_module("performance_table")

ONE_TOKEN = floor.Work(
    samples=1,
    prompts=1,
    prompt_tokens=1,
    response_tokens=1,
    parameters=10**9,
    linear_flops=2e9,
    quadratic_flops=0.0,
    cache_bytes_per_token=0,
)


def test_floor_by_hand():
    phases = floor.floor_seconds(ONE_TOKEN, flops_per_s=1e15, bytes_per_s=2e12)
    assert phases["weight_sync"] == pytest.approx(2e-3)  # 2 GB read, 2 GB written
    assert phases["rollout"] == pytest.approx(2e-6 + 1e-3)  # prefill computes, decoding reads 2 GB
    assert phases["update"] == pytest.approx(12e-6 + 15e-3)  # 30 bytes per parameter
    assert phases["step"] == pytest.approx(sum(value for name, value in phases.items() if name != "step"))


def test_bytes_of_the_optimizer_by_hand():
    assert floor.optimizer_bytes() == floor.Work.optimizer_bytes == 4 + 12 + 12 + 2
    assert floor.optimizer_bytes("bf16") == (4 + 2 + 2 + 4) + (2 + 2 + 4)  # the model's bf16 and two bytes beside it
    assert floor.optimizer_bytes(weight_bytes=4) == (4 + 4 + 8) + (4 + 8)


def test_goals_of_a_busy_machine_by_hand():
    busy = importlib.import_module("busy_machine")

    def row(setting: str, condition: str, token: float, step: float) -> dict[str, Any]:
        return {"setting": setting, "condition": condition, "ms_per_token": {"max": token}, "step_s": {"max": step}}

    alone = row("chosen", "alone", 2.0, 1.0)
    side = [row("chosen", "two runs side by side", worst, 1.5) for worst in (3.0, 7.0)]
    found = busy.reached("two runs side by side", [alone, *side])
    assert found == {
        "goal": "two runs side by side", "limit": 3.0, "ms_per_token": 3.5, "step_s": 1.5, "ok": False,
    }  # fmt: skip


def test_growth_is_the_slope_of_the_second_half():
    growth = importlib.import_module("memory_growth")
    start = [{"step": step, "mib": 100.0 * step} for step in range(10)]
    later = [{"step": step, "mib": 900.0 + 0.5 * step} for step in range(10, 20)]
    assert growth.slope(start + later, "mib") == pytest.approx(500.0)
    assert growth.heap()[0] > 0


def test_floor_of_decoding_is_what_takes_longer():
    from dataclasses import replace

    many = replace(ONE_TOKEN, samples=10_000, cache_bytes_per_token=1000)
    slow_memory = floor.floor_seconds(many, flops_per_s=1e18, bytes_per_s=1e12)["rollout"]
    assert slow_memory == pytest.approx((2e9 + 10_000 * 1000) / 1e12 + 2e9 / 1e18)
    slow_units = floor.floor_seconds(many, flops_per_s=1e13, bytes_per_s=1e15)["rollout"]
    assert slow_units == pytest.approx((10_000 * 2e9 + 2e9) / 1e13)


def test_cache_of_a_token_by_hand():
    from transformers import Qwen3Config

    config = Qwen3Config(num_hidden_layers=28, num_key_value_heads=8, head_dim=128)
    assert floor.cache_bytes_per_token(config) == 114_688


def test_work_that_differs_is_named():
    compare: Any = importlib.import_module("compare")
    same = {"samples": 256, "prompts_sha256": "ab"}
    assert compare.different_work(same, dict(same)) == []
    assert compare.different_work(same, {**same, "samples": 128}) == ["samples: 256 and 128"]
    assert compare.different_work(same, {"samples": 256}) == ["prompts_sha256: ab and not told"]


@pytest.mark.parametrize("autocast", [False, True])
def test_dtype_of_products_is_read_from_training(autocast):
    """Under autocast the residual stream is fp32, which would say nothing."""
    model = torch.nn.ModuleDict({"self_attn": torch.nn.ModuleDict({"o_proj": torch.nn.Linear(2, 2)})})
    model = torch.nn.ModuleList([model])
    compute = work_done.ComputeDtype(model, work_done.TRANSFORMERS_PROJECTION)
    layer = model[0]["self_attn"]["o_proj"]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=not autocast):  # sampling
        layer(torch.ones(1, 2))
    with pytest.raises(RuntimeError, match="nothing was trained"):
        compute.name()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        layer(torch.ones(1, 2))
    assert compute.name() == ("bfloat16" if autocast else "float32")
    layer.bfloat16()(torch.ones(1, 2, dtype=torch.bfloat16))
    assert compute.name() == ("bfloat16" if autocast else "bfloat16 and float32")
    with pytest.raises(ValueError, match="linear_proj"):
        work_done.ComputeDtype(model, work_done.MEGATRON_PROJECTION)


def stepped(dtype: torch.dtype, **state: torch.dtype) -> torch.optim.Optimizer:
    """Return an AdamW that took a step, with further state or state in another dtype."""
    parameter = torch.nn.Parameter(torch.ones(2, dtype=dtype))
    unused = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter, unused], weight_decay=0.0)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.state[parameter].update({name: torch.zeros(2, dtype=kind) for name, kind in state.items()})
    return optimizer


def test_dtypes_of_the_optimizer_are_read_from_its_state():
    half, full, bits = torch.bfloat16, torch.float32, torch.int16
    right = {"main_parameters": "float32", "moments": "fp32", "optimizer": "adam"}
    wide, narrow = {"exp_avg": full, "exp_avg_sq": full}, {"exp_avg": half, "exp_avg_sq": half}
    work = work_done.optimizer_work
    assert work([stepped(full)]) == right
    assert work([stepped(full, **narrow)]) == {**right, "moments": "bf16"}
    assert work([stepped(full, exp_avg=half)])["moments"] == "bf16 and fp32"
    assert work([stepped(half)]) == {**right, "main_parameters": "bfloat16", "moments": "bf16"}
    # Transformer Engine's: the main parameter is in the state, whole or the lower half of it
    assert work([stepped(half, master_param=bits, **narrow)]) == {**right, "moments": "bf16"}
    assert work([stepped(half, master_param=full, **wide)]) == right
    assert work([stepped(half, master_param=torch.float16, **wide)])["main_parameters"] == "float16"
    assert work([stepped(full), stepped(half, **wide)])["main_parameters"] == "bfloat16 and float32"
    with pytest.raises(ValueError, match="no half"):
        work([stepped(torch.float16, master_param=bits)])


def test_an_optimizer_without_adams_state_is_not_taken_for_one():
    parameter = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(RuntimeError, match="no step"):
        work_done.optimizer_work([torch.optim.AdamW([parameter])])
    with pytest.raises(RuntimeError):
        work_done.optimizer_work([])
    decaying, other = stepped(torch.float32), torch.optim.NAdam([parameter])
    decaying.param_groups[0]["weight_decay"] = 0.1
    parameter.grad = torch.ones(2)
    other.step()
    assert work_done.optimizer_work([decaying])["optimizer"] == "AdamW decay=0.1"
    assert work_done.optimizer_work([other])["optimizer"] == "NAdam"
    momentum = torch.optim.SGD([parameter], momentum=0.9)
    momentum.step()
    with pytest.raises(ValueError, match="SGD has no"):
        work_done.optimizer_work([momentum])


def test_a_side_that_takes_too_long_leaves_its_last_lines(monkeypatch, tmp_path):
    common: Any = importlib.import_module("common")
    (tmp_path / "benchmarks").mkdir()
    script = tmp_path / "benchmarks" / "slow.py"
    script.write_text("import time; print('loads weights', flush=True); time.sleep(60)")
    monkeypatch.setattr(common, "ROOT", tmp_path)
    with pytest.raises(RuntimeError, match=r"slow.py --x took more than 3 s:\nloads weights"):
        common.run_child("slow.py", ["--x"], 3.0)


def test_commands_in_results_leave_out_where_files_went():
    common: Any = importlib.import_module("common")
    given = ["--steps", "3", "--out", "a.json", "--work=b", "--syncs=4"]
    assert common.measured_arguments(given) == ["--steps", "3", "--syncs=4"]


def test_rate_of_a_sync_by_hand():
    weight_sync: Any = importlib.import_module("weight_sync")
    sync = {"seconds": {"median": 0.1}, "bytes": 10**9, "extra_bytes": 2**30}
    expected = {"seconds": 0.1, "gb_per_s": 10.0, "limit_seconds": 1e-3, "share_of_limit": 0.01, "extra_gib": 1.0}
    found = weight_sync.rate(sync, bytes_per_s=2e12, peer_bytes_per_s=None)
    assert found.pop("limited_by") == "memory"
    assert found == pytest.approx(expected)
    apart = {**sync, "peer_bytes": 10**9}
    found = weight_sync.rate(apart, bytes_per_s=2e12, peer_bytes_per_s=1e11)
    assert found.pop("limited_by") == "links between GPUs"
    assert found == pytest.approx({**expected, "limit_seconds": 1e-2, "share_of_limit": 0.1})
    assert weight_sync.rate(apart, bytes_per_s=2e12, peer_bytes_per_s=1e13)["limited_by"] == "memory"


def test_a_model_with_fewer_positions_is_refused(tmp_path):
    common: Any = importlib.import_module("common")
    common.write_model(tmp_path, "tiny")
    assert common.write_model(tmp_path, "tiny", common.POSITIONS) == tmp_path
    with pytest.raises(ValueError, match=f"{common.POSITIONS} positions for a sequence of 200000 tokens"):
        common.write_model(tmp_path, "tiny", 200_000)


@pytest.mark.parametrize("document", tables.DOCUMENTS)
def test_tables_in_the_documents_are_those_of_the_results(document):
    text = (ROOT / document).read_text()
    assert text == tables.with_tables(text), "run: python scripts/performance_table.py"
    assert any(f"<!-- {name} -->" in text for name in tables.TABLES)


def test_goals_are_reached_or_missed(tmp_path):
    """Without rounding: 9.96 is not 10."""
    layout = "world 2 = tp 2 x pp 1"
    for name, share, peer in (("a", 0.6, 10.0), ("b", 0.5999, 10.04), ("0.6b", 0.4, 10.0)):
        rates = {"ours": {"share_of_limit": share, "gb_per_s": 100.0}, "trl": {"gb_per_s": peer}}
        ours = {"shape": name, "layout": layout if name == "0.6b" else ""}
        result = {"device": "NVIDIA X9 GPU", "ours": ours, "rates": rates}
        (tmp_path / f"weight_sync_{name}.json").write_text(json.dumps(result))
    lines = tables.goals(tmp_path).splitlines()
    assert lines[2] == "| B1, share of the limit | 60 % | 60.0% (a, X9) | 60.0% (b, X9) |"
    assert lines[3] == "| B1, share of the limit at 0.6b, TP 2 | 40 % | 40.0% (0.6b, X9, tp 2) | – |"
    assert lines[4] == "| B1, rate over TRL's | 10 | 10.00 (0.6b, X9, tp 2); 10.00 (a, X9) | 9.96 (b, X9) |"
    assert lines[5].endswith("| 35 % | – | – |")


def test_curves_from_the_same_weights_are_compared(tmp_path):
    runs = {"a": (0.5, "1" * 64), "b": (0.75, "2" * 64), "c": (0.875, "2" * 64), "d": (0.25, None)}
    for name, (level, start) in runs.items():
        length = 60 if name in "bd" else 30
        result = {
            "device": "NVIDIA X9",
            "layout": f"world {name}",
            "parameters": 5_000_000,
            "sft": {"sha256": start} if start else {},
            "curves": {"reward/mean": [list(range(length)), [level] * length]},
        }
        (tmp_path / f"real_run_{name}.json").write_text(json.dumps(result))
    lines = tables.curves(tmp_path).splitlines()
    assert lines[0] == "| rollouts | warm start | 1–25 | 26–50 |"
    assert lines[2:] == [
        "| 5 M, NVIDIA X9, world a | 111111 | 0.500 | – |",
        "| 5 M, NVIDIA X9, world b | 222222 | 0.750 | 0.750 |",
        "| 5 M, NVIDIA X9, world c | 222222 | 0.875 | – |",
        "| 5 M, NVIDIA X9, world d | its own | 0.250 | 0.250 |",
        "| largest difference of those from warm start 222222 | – | 0.125 | – |",
    ]


def test_results_say_where_they_come_from():
    names = (
        "throughput",
        "weight_sync",
        "grpo_step",
        "handover",
        "decoding",
        "real_run",
        "checkpoint",
        "convert",
        "long_tail",
    )
    for name in names:
        for stem, result in tables.load(f"{name}_*.json"):
            for key in ("command", "device", "versions", "python", "date"):
                assert result[key], f"{stem}: {key}"
            assert result["command"].startswith("python benchmarks/")


def test_what_was_not_measured_is_called_so(monkeypatch):
    marks = "<!-- real run -->\n| old |\n<!-- end of real run -->\n"
    monkeypatch.setitem(tables.TABLES, "real run", lambda: "| head |\n|---|\n")
    assert "Not measured yet." in tables.with_tables(marks)
    monkeypatch.setitem(tables.TABLES, "real run", lambda: "| head |\n|---|\n| 1 |\n")
    assert tables.with_tables(marks) == "<!-- real run -->\n| head |\n|---|\n| 1 |\n<!-- end of real run -->\n"


def run_benchmark(script: str, *arguments: str, timeout: float = 240) -> str:
    """Run a benchmark in a process of its own and return what it prints."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), "--device=cpu", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": CHILD_PATH, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.deadline(500)  # two runs
def test_throughput_runs_on_a_cpu(tmp_path: Path):
    out = tmp_path / "throughput.json"
    arguments = ["--steps=2", "--warmup=1", "--sequences=4", "--shortest=8", "--longest=16", "--max-tokens=64"]
    shown = run_benchmark("throughput.py", *arguments, "--out", str(out))
    (row,) = json.loads(out.read_text())["rows"]
    assert row["update"]["seconds"]["count"] == 2
    assert row["losses"][-1] < row["losses"][0]  # it trains: the same batch three times
    assert row["plan"][0].startswith("trainer: process")
    assert "tok/s" in shown
    assert out.with_suffix(".png").exists()
    halves = tmp_path / "halves.json"
    arguments += ["--devices=2", "--context-parallel=2", "--recompute"]
    run_benchmark("throughput.py", *arguments, "--out", str(halves))
    (split,) = json.loads(halves.read_text())["rows"]
    assert "cp 2" in split["layout"]
    assert split["tokens_per_update"] == row["tokens_per_update"]  # a sequence counts once
    assert split["losses"] == pytest.approx(row["losses"], rel=1e-5)  # fp32, sums in another order


def test_ranks_take_the_model_that_rank_0_wrote(tmp_path: Path, monkeypatch):
    common: Any = importlib.import_module("common")
    monkeypatch.setenv(common.MODEL, "")
    monkeypatch.delenv(common.MODEL)
    mine = common.model_directory(None, tmp_path / "rank 0")
    assert mine == tmp_path / "rank 0" / "model"
    assert common.model_directory(None, tmp_path / "rank 1") == mine  # the variable is inherited
    assert common.model_directory(tmp_path / "kept", tmp_path) == tmp_path / "kept"


def test_shares_of_a_save_by_hand():
    checkpoint: Any = importlib.import_module("checkpoint")
    sync = {"blocked_s": {"median": 2.0}, "bytes": 3e9}
    verify = {"verify_s": {"median": 0.3}, "load_s": {"median": 0.6}}
    beside = {
        "blocked_s": {"median": 0.1},
        "bytes": 3e9,
        "complete_s": {"median": 3.0},
        "slowed_s_per_save": 0.3,
        **verify,
    }
    assert checkpoint.compare({"sync": sync, "async": beside}) == pytest.approx(
        {
            "blocked_share": 0.05,
            "blocked_and_slowed_share": 0.2,
            "sync_gb_per_s": 1.5,
            "async_gb_per_s": 1.0,
            "verify_share_of_load": 0.5,
        }
    )


@pytest.mark.slow
@pytest.mark.deadline(250)
def test_checkpoint_runs_on_a_cpu(tmp_path: Path):
    out = tmp_path / "checkpoint.json"
    shown = run_benchmark("checkpoint.py", "--shape=tiny", "--saves=3", "--threads=1", "--out", str(out))
    result = json.loads(out.read_text())
    assert result["async"]["bytes"] == pytest.approx(16 * result["async"]["parameters"], rel=0.1)  # fp32 state
    assert result["async"]["blocked_s"]["count"] == 2
    assert "blocked" in shown


@pytest.mark.slow
@pytest.mark.deadline(250)
@pytest.mark.parametrize("experts", [0, 4])
def test_real_run_runs_on_a_cpu(tmp_path: Path, experts: int):
    out = tmp_path / "real_run.json"
    sizes = ["--digits=1", "--problems=40", "--held-out=10", "--sft-steps=4", "--sft-batch=8", "--sft-check=2"]
    sizes += ["--rollouts=2", "--prompts=4", "--check=1", f"--experts={experts}", "--out", str(out)]
    if not experts:
        shown = run_benchmark("real_run.py", *sizes)
    else:  # in two stages
        work = ["--work", str(tmp_path / "work")]
        run_benchmark("real_run.py", *sizes, *work, "--stage=sft")
        assert not out.exists()
        run_benchmark("real_run.py", *sizes, *work, "--stage=grpo")
        ahead = ["--bound=1", "--separate"]  # from the same warm start
        shown = run_benchmark("real_run.py", *sizes, *work, "--stage=grpo", *ahead)
    result = json.loads(out.read_text())
    assert result["experts"] == experts
    assert result["rollouts"] == 2
    assert result["sft"]["steps"] == 4
    assert result["samples_per_rollout"] == 32
    assert result["mismatch_worst"] < 1e-3  # fp32 on both sides
    assert all(result["phase_seconds"][phase] > 0 for phase in ("rollout", "update", "weight_sync"))
    assert result["layout"].endswith(", staleness at most 1, sampler beside it" if experts else "dp 1")
    assert "accuracy" in shown


@pytest.mark.slow
@pytest.mark.deadline(250)
@pytest.mark.parametrize("script", ["grpo_step.py", "weight_sync.py"])
def test_step_and_sync_run_on_a_cpu(tmp_path: Path, script):
    out = tmp_path / "result.json"
    sizes = ["--steps=1", "--warmup=1", "--prompts=2", "--generations=2", "--prompt-tokens=4", "--response-tokens=4"]
    profile = tmp_path / "profile.txt"  # of weight syncs, where there are some
    run_benchmark(script, *sizes, "--peer=none", "--out", str(out), "--profile", str(profile))
    result = json.loads(out.read_text())
    assert result["ours"]["work"]["response_tokens_per_step"] == [16, 16]  # EOS is ignored
    numbers = {"compute_dtype": "float32", "main_parameters": "float32", "moments": "fp32", "optimizer": "adam"}
    assert {name: result["ours"]["work"][name] for name in numbers} == numbers
    assert max(result["ours"]["mismatch"]) < 1e-3  # the weights arrived
    if script == "weight_sync.py":
        assert result["rates"]["ours"]["share_of_limit"] < 1
        assert "run_on_leader" in profile.read_text()
    else:
        assert result["times_floor"] > 1


def test_lengths_have_a_long_tail():
    lengths = response_lengths.LongTail(3900)
    drawn = [lengths([row, 7], place) for row in range(500) for place in range(8)]
    assert drawn == [lengths([row, 7], place) for row in range(500) for place in range(8)]
    assert sum(drawn) / len(drawn) == pytest.approx(884, rel=0.05)
    assert sorted(drawn)[len(drawn) // 2] == pytest.approx(700, rel=0.05)
    assert sum(length == 3900 for length in drawn) == pytest.approx(len(drawn) * 0.011, rel=0.4)
    assert min(drawn) > 0
    assert max(drawn) == 3900


def test_the_work_of_an_epoch_is_that_of_its_groups_in_any_order():
    groups = [([5, 6], [3, 1]), ([4, 4], [2, 2])]
    found = response_lengths.work(groups)
    assert (found["samples"], found["response_tokens"]) == (4, 8)
    assert found == response_lengths.work(groups[::-1])
    for other in ([([5, 6], [1, 3]), groups[1]], [([5, 7], [3, 1]), groups[1]], groups[:1]):
        assert found["groups_sha256"] != response_lengths.work(other)["groups_sha256"]


def test_another_engine_is_made_to_draw_the_same_lengths():
    class Params:
        max_tokens = 99

        def clone(self) -> "Params":
            return Params()

    class Engine:
        def generate(self, prompts: list[Any], sampling_params: list[Params], use_tqdm: bool) -> list[int]:
            assert not use_tqdm
            return [params.max_tokens for params in sampling_params]

    engine, lengths = Engine(), response_lengths.LongTail(104)
    response_lengths.force_lengths(engine, lengths)
    prompts = [{"prompt_token_ids": [7, 8]}, {"prompt_token_ids": [7, 8]}, {"prompt_token_ids": [9, 8]}]
    found: Any = engine.generate(prompts, sampling_params=Params(), use_tqdm=False)  # type: ignore[arg-type]
    assert found == [lengths([7, 8], 0), lengths([7, 8], 1), lengths([9, 8], 0)]


@pytest.mark.slow
@pytest.mark.deadline(500)  # three runs, each with samplers of its own
@pytest.mark.parametrize(
    ("placements", "found", "last"),
    [
        ("shared,separate", [None, "shared", "separate"], "separate, bound 1"),
        ("replicas", [None, None, "shared"], "shared on 2 devices, bound 1"),
    ],
)
def test_long_tail_runs_on_a_cpu(tmp_path: Path, placements: str, found: list[str | None], last: str):
    out = tmp_path / "long_tail.json"
    sizes = ["--steps=3", "--warmup=1", "--drain=1", "--groups=2", "--generations=2", "--prompt-tokens=4"]
    sizes += ["--longest=24", "--bounds=1", f"--placements={placements}", "--out", str(out)]
    shown = run_benchmark("long_tail.py", *sizes, timeout=480)
    result = json.loads(out.read_text())
    assert [row["placement"] for row in result["rows"]] == found
    assert len({row["work"]["groups_sha256"] for row in result["rows"]}) == 1
    for row in result["rows"]:
        assert sum(row["response_tokens_per_step"]) == row["work"]["response_tokens"]
        assert row["samples_per_s"] > 0
        assert row["staleness_max"] <= row["max_staleness"]
        assert row["simulated_speedup"] is None or row["simulated_speedup"] > 0.9  # rates of some milliseconds
        assert max(row["mismatch"]) < 1e-3 or row["max_staleness"]  # the weights arrived
    assert last in shown
    assert out.with_suffix(".png").exists()


@pytest.mark.slow
@pytest.mark.deadline(250)
def test_handover_runs_on_a_cpu(tmp_path: Path):
    out = tmp_path / "handover.json"
    sizes = ["--steps=1", "--warmup=1", "--prompts=2", "--generations=2", "--prompt-tokens=4", "--response-tokens=4"]
    shown = run_benchmark("handover.py", *sizes, "--out", str(out))
    found = json.loads(out.read_text())["ours"]
    assert found["handover"]["time/offload_s"]["median"] > 0
    assert max(found["mismatch"]) < 1e-3  # nothing was lost on the way
    assert "the trainer left" in shown


@pytest.mark.parametrize(
    ("spans", "busy", "idle"),
    [
        ([], 0, {}),
        ([(10, 20, "a"), (20, 25, "b")], 15, {}),
        ([(30, 40, "b"), (10, 20, "a"), (45, 50, "b")], 25, {"b": 15}),  # not in the order of time
        ([(0, 50, "a"), (10, 20, "b"), (40, 60, "c"), (70, 71, "a")], 61, {"a": 10}),  # side by side, in streams
    ],
)
def test_waits_of_a_gpu(spans: list[Any], busy: float, idle: dict[str, float]):
    assert importlib.import_module("profiles").waits(spans) == (busy, idle)


@pytest.mark.slow
@pytest.mark.deadline(250)
def test_decoding_runs_on_a_cpu(tmp_path: Path):
    out, profile = tmp_path / "decoding.json", tmp_path / "profile.txt"
    sizes = ["--layers=2", "--prompts=2", "--response-tokens=4", '--vllm-args={"block_size": 32}']
    shown = run_benchmark("decoding.py", *sizes, "--out", str(out), "--profile", str(profile))
    result = json.loads(out.read_text())
    assert result["device"].startswith("CPU")
    found = result["only"]
    assert found["ms_per_token"]["count"] == found["vllms_own_ms_per_token"]["count"] == 4
    assert found["same_responses_again"] == 1  # seeds, and fp32
    assert result["vllm_args"] == {"block_size": 32}
    assert "ms per token" in shown
    assert "update_from_output" in profile.read_text()


def test_decoding_refuses_layers_that_a_given_model_has_not(tmp_path: Path, monkeypatch):
    (tmp_path / "tokenizer_config.json").touch()  # it is whole
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 99, "num_hidden_layers": 4}')
    decoding: Any = importlib.import_module("decoding")
    monkeypatch.setitem(decoding.SHAPES["tiny"], "num_hidden_layers", 4)  # it is set to what is asked for
    options = argparse.Namespace(layers=2, shape="tiny", device="cpu", prompts=1, model=tmp_path)
    with pytest.raises(ValueError, match=r"--layers 2 with the model in .*, which has 4 layers"):
        decoding.start(options)


@pytest.mark.slow
@pytest.mark.deadline(250)
def test_rates_between_processes_are_measured(tmp_path: Path):
    out = tmp_path / "rates.json"
    shown = run_benchmark("nccl_rates.py", "--devices=3", "--mib=1", "--repeats=2", "--out", str(out))
    rates = json.loads(out.read_text())["rates"]
    names = [rate["what"] for rate in rates]
    assert names == ["all-to-all", "all-gather", "reduce-scatter", "messages of one to 1", "messages of one to 2"]
    one, both = (rate["seconds"] * rate["gb_per_s"] * 1e9 for rate in rates[3:])
    assert (one, both) == (pytest.approx(2**20), pytest.approx(2**21))
    assert all(name in shown for name in names)
