"""Peers of the benchmarks: what they are told, what is read from their runs; a failure costs no other side."""

import argparse
import importlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import yaml

from tests.command_line import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))  # they import each other by their bare names
common: Any = importlib.import_module("common")
compare: Any = importlib.import_module("compare")
long_tail: Any = importlib.import_module("long_tail")
peers: Any = importlib.import_module("peers")
verl_peer: Any = importlib.import_module("verl_peer")
verl_worker: Any = importlib.import_module("verl_worker")
WORK = {"samples_per_step": [4]}


def options(**changed: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    importlib.import_module("ours").add_arguments(parser, "cpu")
    found = parser.parse_args(["--prompts=2", "--generations=2", "--steps=1", "--warmup=1", "--prompt-tokens=3"])
    vars(found).update({"long_tail": False, "mode": "sync", "bound": 0, "ahead": 1, "verl_variant": "plain", **changed})
    return found


class Children:
    """Stands for the processes of sides: no peer runs without a GPU."""

    def __init__(self, **answers: Any) -> None:
        self.answers, self.arguments = answers, []

    def __call__(self, script: str, arguments: list[str], timeout_s: float, path: Any = ()) -> dict[str, Any]:
        self.arguments.append((script, arguments))
        name = next((part.partition("=")[2] for part in arguments if part.startswith("--verl-variant=")), script)
        answer = self.answers[name.removesuffix(".py")]
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return {"work": WORK, **answer}


def side(seconds: float, **more: Any) -> dict[str, Any]:
    return {"step_s": {"median": seconds}, **more}


def verl_side(arguments: list[str], wanted: dict[str, Any], variants: list[str]) -> dict[str, Any]:
    with compare.Sides() as pool:
        started = compare.start_peer(pool, "verl", arguments, 60, variants)
        return compare.peer_side("verl", started, wanted)


def test_a_peer_that_fails_costs_only_its_own_figures(monkeypatch):
    monkeypatch.setattr(compare, "run_child", Children(ours=side(1.0), trl_peer="ended with 1", plain=side(2.0)))
    *_, last = [dict(sides) for sides in compare.run_sides([], ["trl", "verl"], 60)]
    assert last["ours"] == {"work": WORK, **side(1.0)}
    assert last["trl"] == {"failed": "ended with 1"}
    assert last["verl"]["different_work"] == []
    assert list(compare.measured(last)) == ["verl"]


def test_the_fastest_of_verl_s_variants_is_its_row(monkeypatch):
    children = Children(ours=side(1.0), plain=side(3.0), awake=side(2.0, variant="awake"), fused="took more than 60 s")
    monkeypatch.setattr(compare, "run_child", children)
    found = verl_side(["--steps=1"], {"samples_per_step": [8]}, ["plain", "awake", "fused"])
    assert found["variant"] == "awake"
    assert found["variants"] == {"plain": 3.0, "awake": 2.0, "fused": "took more than 60 s"}
    assert found["different_work"] == ["samples_per_step: [8] and [4]"]
    assert children.arguments[0][1] == ["--steps=1", "--verl-variant=plain", "--deadline=30"]
    monkeypatch.setattr(compare, "run_child", Children(fused="out of memory"))
    found = verl_side([], WORK, ["fused"])
    assert found == {"failed": "out of memory", "variants": {"fused": "out of memory"}}


def test_peers_run_on_one_device():
    with pytest.raises(ValueError, match=r"--devices=2 with --peer trl: peers run on one device; --peer none"):
        next(compare.run_sides(["--devices=2"], ["trl"], 1))


def test_a_peer_that_is_not_there_is_refused_with_the_command(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(peers, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ValueError, match=r"--peer verl: it is not installed. `make peers` installs verl 0\.9\.1 into"):
        peers.chosen("verl")
    other = tmp_path / "trl-1.0.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: trl\nVersion: 1.0.0\n")
    with pytest.raises(ValueError, match=r"trl 1\.0\.0 is installed. `make peers` installs trl 1\.16\.0"):
        peers.chosen("all")
    assert peers.chosen("none") == ()


def test_every_bound_has_its_side_of_verl():
    assert long_tail.peer_sides(["trl", "verl"], [1, 4], ["shared"]) == {
        "trl": [],
        "verl, synchronous": ["--mode=sync"],
        "verl, bound 1": ["--mode=colocate_async", "--bound=1", "--ahead=1"],
        "verl, bound 4": ["--mode=colocate_async", "--bound=4", "--ahead=4"],
    }
    assert long_tail.peer_sides(["trl", "verl"], [2], ["separate"]) == {
        "trl, two GPUs": [],
        "trl, asynchronous, bound 2": ["--bound=2"],
        "verl, separate, bound 2": ["--mode=separate_async", "--bound=2", "--ahead=2"],
    }


def test_rows_of_two_gpus_are_held_to_peers_on_two():
    """Each to its mode of the same placement, and to no other."""
    rows = [
        {"placement": placement, "max_staleness": bound, "devices": 1, "samples_per_s": 9.0, "speedup": 1.7}
        for placement, bound in ((None, 0), ("shared", 1), ("separate", 1), ("separate", 2))
    ]
    rates = {"verl, bound 1": 6.0, "verl, separate, bound 1": 10.0, "trl, two GPUs": 3.0}
    others = {name: {"samples_per_s": rate} for name, rate in rates.items()}
    found = {goal["side"]: goal["reached"] for goal in long_tail.goals(rows, "cuda", others)}
    assert found == {
        "shared, bound 1": 1.7,
        "shared, bound 1, against verl, bound 1": 1.5,
        "separate, bound 1": 1.7,
        "separate, bound 1, against verl, separate, bound 1": 0.9,
        "separate, bound 2": 1.7,
        "separate, bound 2, against trl, two GPUs": 3.0,
    }


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"verl_variant": "awake+quick"}, r"--verl-variant awake\+quick: no quick; there are plain, awake"),
        ({"bound": 2}, "--mode sync --bound 2: sync has 0"),
        ({"mode": "colocate_async"}, "--mode colocate_async --bound 0: .* the other modes at least 1"),
    ],
)
def test_what_verl_cannot_be_told_is_refused(changed, message, tmp_path: Path):
    with pytest.raises(ValueError, match=message):
        verl_peer.prepare(options(**changed), tmp_path)


def test_verl_is_told_the_same_numbers(tmp_path: Path):
    asked = options(mode="colocate_async", bound=2, ahead=2, verl_variant="awake+polling")
    command, environment = verl_peer.prepare(asked, tmp_path)
    assert "trainer.v1.sampler.max_off_policy_threshold=3" in command  # versions that a sample spans
    assert "actor_rollout_ref.rollout.free_cache_engine=False" in command
    assert f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={asked.max_tokens}" in command
    assert "trainer.v1.colocate_async.num_warmup_batches=2" in command
    assert environment[verl_worker.POLL] == "0.1"
    assert "VERL_LOGGING_LEVEL" not in environment
    (tmp_path / "apart").mkdir()
    _, apart = verl_peer.prepare(options(mode="separate_async", bound=2), tmp_path / "apart")
    assert apart["VERL_LOGGING_LEVEL"] == "WARN"  # or it ends while it starts
    import pandas

    rows = pandas.read_parquet(tmp_path / "rows.parquet")
    assert len(rows) == 2 * (1 + 1 + 2)
    # the first of more prompts are the prompts of the other sides
    fewer = common.TokenPrompts(4, 3, common.SHAPES["tiny"]["vocab_size"])()
    assert [row[0]["content"] for row in rows["prompt"]][:4] == [row["prompt"] for row in fewer]


def test_words_are_tokens(tmp_path: Path):
    tokenizer = common.make_tokenizer(64)
    text = "t17 t4 t0"
    assert verl_worker.token_ids(text) == tokenizer(text)["input_ids"]
    ids = [5, 20, 9]
    assert verl_worker.reward("tokens", tokenizer.decode(ids), "") == common.token_reward(ids)


def notes(step: int, place: int, tokens: int, prompt: list[int]) -> dict[str, Any]:
    return {"kind": "sample", "index": step, "place": place, "prompt": prompt, "response_tokens": tokens}


def test_work_of_verl_is_told_as_ours_is():
    """Samples of prompts that were read ahead and not trained on do not count."""
    import hashlib

    asked = options(prompts=1)
    prompts = [[4, 5, 6], [7, 8, 9], [1, 1, 1]]
    told = [notes(index, place, 10 + index, prompts[index]) for index in (1, 0, 2) for place in (1, 0)]
    told += [{"kind": "step"}, {"kind": "step"}, {"kind": "numbers", "compute_dtype": "bfloat16"}]
    digest = hashlib.sha256()
    for prompt in prompts[:2]:
        digest.update(repr([tuple(prompt)]).encode())
    assert verl_peer.work_done(asked, told) == {
        "samples_per_step": [2, 2],
        "response_tokens_per_step": [20, 22],
        "prompt_tokens": 3,
        "prompts_sha256": digest.hexdigest(),
        "optimizer_steps": 2,
        "compute_dtype": "bfloat16",
    }
    lengths = importlib.import_module("response_lengths")
    found = verl_peer.work_done(options(prompts=1, long_tail=True), told)
    assert found.items() >= lengths.work([(prompts[0], [10, 10]), (prompts[1], [11, 11])]).items()


def test_report_reads_verl_s_own_times(tmp_path: Path):
    steps = [
        {"timing_s/step": 9.0, "timing_s/gen": 5.0},
        {
            "timing_s/step": 4.0,
            "timing_s/gen": 2.5,
            "timing_s/update_actor": 1.0,
            "actor/perf/max_memory_allocated_gb": 3.0,
        },
    ]
    lines = [json.dumps({"step": number, "data": data}) for number, data in enumerate(steps, 1)]
    (tmp_path / "steps.jsonl").write_text("\n".join([*lines, json.dumps({"step": 2, "data": {"val": 1}})]))
    (tmp_path / "notes").mkdir()
    found = verl_peer.report(options(), tmp_path)
    assert found["step_s"]["median"] == 4.0
    assert found["phases"]["rollout"]["median"] == 2.5
    assert found["phases"]["everything else"]["median"] == 0.5
    assert found["peak_memory_gib"] == 3.0
    with pytest.raises(RuntimeError, match="verl logged 2 steps, 4 were asked for"):
        verl_peer.report(options(steps=3), tmp_path)


def test_a_peer_that_hangs_leaves_no_process(tmp_path: Path):
    """Also one that has become nobody's child, as Ray's are when verl is gone."""
    script = "import subprocess, sys, time; subprocess.Popen(['sleep', '600'], start_new_session=True); time.sleep(600)"
    environment = {**os.environ, verl_worker.NOTES: str(tmp_path)}
    with pytest.raises(RuntimeError, match="verl took more than 3 s"):
        verl_peer.run([sys.executable, "-c", script], environment, tmp_path, 3.0)
    left = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(verl_worker.NOTES) == str(tmp_path) and process.status() != psutil.STATUS_ZOMBIE:
                left.append(process)
        except psutil.Error:
            continue
    assert left == []


def in_peers(code: str, directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code or a peer's script where the peers are installed, without a GPU."""
    if not (peers.FOLDER / "verl").exists():
        pytest.skip("the peers are not installed: `make peers`")
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), str(peers.FOLDER)])
    variables = {verl_worker.NOTES: str(directory), verl_worker.LONG_TAIL: "0", verl_worker.POLL: "0.1", "RANK": "0"}
    extra = {} if arguments else {**variables, "VERL_USE_EXTERNAL_MODULES": "verl_worker"}
    command = [sys.executable, *(arguments or ("-c", code))]
    environment = {**os.environ, "PYTHONPATH": path, **extra}
    return subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=200, check=False
    )


@pytest.mark.slow
@pytest.mark.deadline(250)
@pytest.mark.parametrize("mode", ["colocate_async", "separate_async"])
def test_verl_composes_what_it_is_told(mode, tmp_path: Path):
    script = str(ROOT / "benchmarks" / "verl_peer.py")
    asked = ["--device=cpu", f"--mode={mode}", "--bound=2", "--verl-variant=awake+fused+bypass", "--config-only"]
    done = in_peers("", tmp_path, script, *asked)
    assert done.returncode == 0, done.stderr[-2000:]
    found = yaml.safe_load(done.stdout)
    assert found["trainer"]["v1"]["trainer_mode"] == mode
    apart = mode == "separate_async"
    assert found["actor_rollout_ref"]["hybrid_engine"] is not apart
    assert found["actor_rollout_ref"]["rollout"]["nnodes"] == apart
    assert found["trainer"]["v1"][mode]["num_warmup_batches"] == 1
    assert found["trainer"]["v1"]["sampler"]["max_off_policy_threshold"] == 3
    assert found["actor_rollout_ref"]["model"]["use_fused_kernels"]
    assert not found["actor_rollout_ref"]["rollout"]["free_cache_engine"]
    correction = found["actor_rollout_ref"]["actor"]["policy_loss"]["rollout_correction"]
    assert correction == {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": 2.0}
    assert found["algorithm"]["rollout_correction"]["rollout_is"] == "token"


@pytest.mark.slow
@pytest.mark.deadline(250)
def test_verl_s_processes_load_what_they_are_given(tmp_path: Path):
    code = (
        "import verl, verl_worker, megatron.energon\n"
        "from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer\n"
        "from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer\n"
        "print(ReplayBuffer.__init__.__qualname__, MixedPrecisionOptimizer.step_with_ready_grads.__qualname__)\n"
        "print(verl_worker.TokensAgentLoop.__mro__[1].__name__)\n"
    )
    done = in_peers(code, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    hooks = "poll_more_often.<locals>.init note_numbers.<locals>.step"
    assert done.stdout.splitlines()[-2:] == [hooks, "AgentLoopBase"]


@pytest.mark.slow
@pytest.mark.deadline(250)
def test_trl_on_two_processes_does_the_work_of_one(tmp_path: Path):
    """On a CPU, where it generates with Transformers: each process has its part of the prompts of a step."""
    asked = ["--device=cpu", "--prompts=4", "--generations=4", "--trl-batch=4", "--steps=1", "--warmup=1"]
    works = []
    for devices in (1, 2):
        script = str(ROOT / "benchmarks" / "trl_peer.py")
        done = in_peers("", tmp_path, script, *asked, f"--devices={devices}")
        assert done.returncode == 0, done.stderr[-2000:]
        works.append(json.loads(done.stdout.splitlines()[-1])["work"])
    assert works[0] == works[1]
    assert works[0]["samples_per_step"] == [16, 16]


def test_a_run_of_two_gpus_needs_no_row_of_one():
    def todo(device: str, placement: str) -> list[tuple[str, int, int]]:
        options = argparse.Namespace(device=device, servers=[0], on_update=["recomputed"], parts=[1])
        found = long_tail.wanted(options, [placement], [2], [])
        return [(side.placement, side.bound, side.devices) for side in found]

    assert todo("cuda", "separate") == [("shared", 0, 2), ("separate", 2, 1)]
    assert todo("cuda", "shared") == [("shared", 0, 1), ("shared", 2, 1)]
    assert todo("cpu", "separate") == [("shared", 0, 1), ("separate", 2, 1)]


def test_groups_in_flight_are_bounded():
    given = argparse.Namespace(device="cuda", groups=16, in_flight={1: 48, 2: 24, 4: 8})
    assert [long_tail.in_flight(given, bound) for bound in (0, 1, 2, 4)] == [16, 32, 24, 16]


def test_groups_in_flight_are_told_for_all_bounds_or_each(monkeypatch, capsys):
    asked = ["long_tail.py", "--device=cuda", "--bounds=1,2,4", "--in-flight", "32", "48"]
    monkeypatch.setattr(sys, "argv", asked)
    with pytest.raises(SystemExit):
        long_tail.main()
    assert "--in-flight 32 48 with --bounds 1,2,4: give one number, or one for each" in capsys.readouterr().err


def test_segments_attend_to_their_own_keys():
    """As each sequence alone: the second has two thirds of its keys behind it, the last is one token."""
    attend: Any = importlib.import_module("segment_attention").attend
    torch.manual_seed(0)
    lengths = [(5, 5), (2, 6), (1, 1)]  # queries and keys
    queries = [torch.randn(count, 4, 8) for count, _ in lengths]
    keys, values = ([torch.randn(count, 2, 8) for _, count in lengths] for _ in range(2))
    wanted = []
    for (count, length), query, key, value in zip(lengths, queries, keys, values, strict=True):
        rows = torch.zeros(count, 4, 8)
        for place, head in itertools.product(range(count), range(4)):
            seen = length - count + place + 1
            weights = torch.softmax(key[:seen, head // 2] @ query[place, head] * 0.3, 0)
            rows[place, head] = weights @ value[:seen, head // 2]
        wanted.append(rows)
    starts_q, starts_k = torch.tensor([0, 5, 7, 8]), torch.tensor([0, 5, 11, 12])
    packed = [torch.cat(parts) for parts in (queries, keys, values)]
    settings = {"softmax_scale": 0.3, "causal": True, "window_size": (-1, -1)}
    found = attend(*packed, starts_q, starts_k, 5, 6, **settings)
    assert torch.allclose(found, torch.cat(wanted), atol=1e-6)  # sums of six terms in fp32
    with pytest.raises(ValueError, match=r"window_size=\(3, 0\): plain causal attention"):
        attend(*packed, starts_q, starts_k, 5, 6, **settings | {"window_size": (3, 0)})


def test_trls_asynchronous_trainer_has_a_script_of_its_own():
    started: list[str] = []
    pool = SimpleNamespace(start=lambda script, *_: started.append(script))
    compare.start_peer(pool, "trl", ["--steps=2"], 9.0)
    compare.start_peer(pool, "trl", ["--steps=2", "--bound=2"], 9.0, devices=2)
    assert started == ["trl_peer.py", "trl_async_peer.py"]
