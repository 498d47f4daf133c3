"""What happens when the engine's process, an update, or the trainer itself fails."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lightning_megatron_rl.rollout import EngineCallError, SamplingParams
from lightning_megatron_rl.rollout.model_directory import CheckpointLayout, SourceCheck
from lightning_megatron_rl.weights.source import source_of
from tests.distributed import CHILD_PATH
from tests.policing import leaked_memory, shared_memory
from tests.rollout.conftest import (
    is_running,
    make_engine,
    make_requests,
    max_logprob_error,
    random_weights,
    session_members,
)
from tests.rollout.test_vllm import TOLERANCE

PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_it_outlives_the_thread_that_started_it(fault_harness):
    """PR_SET_PDEATHSIG fires when the parent's *thread* ends, so it must not be set from another than the main one."""
    assert fault_harness.restarts_after_its_starter == 0


def test_tied_embeddings_are_updated_on_both_sides(fault_harness):
    """On CPU the output embedding is a repacked copy: an update that only reaches the input embedding shows here."""
    requests = make_requests(4)
    fault_harness.push_random_weights(21)
    assert (
        max_logprob_error(fault_harness.model, requests, fault_harness.engine.generate(requests, PARAMS)) <= TOLERANCE
    )


def test_kill_minus_9_during_generate_is_survived(fault_harness, caplog):
    engine = fault_harness.engine
    fault_harness.push_random_weights(22)
    requests = make_requests(32, num_generations=4)
    long = SamplingParams(max_tokens=128, ignore_eos=True)
    restarts, pid = engine.num_restarts, engine.pid
    threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
    results = engine.generate(requests, long)
    assert engine.num_restarts == restarts + 1
    assert f"process {pid} was killed by SIGKILL" in str(engine._failures[-1])
    assert "during generate" in str(engine._failures[-1])
    assert f"is replaced (restart {restarts + 1} of max_restarts=100): the engine's process {pid} was killed by" in (
        caplog.text
    )
    assert engine.weight_version == fault_harness.version
    assert max_logprob_error(fault_harness.model, requests[:4], results[:4]) <= TOLERANCE
    # the new process draws what the old one would have drawn
    again = engine.generate(requests, long)
    assert [[g.token_ids for g in group] for group in again] == [[g.token_ids for g in group] for group in results]


@pytest.mark.slow
def test_process_that_is_stopped_is_replaced_at_the_deadline(fault_harness, caplog):
    engine, requests = fault_harness.engine, make_requests(4)
    fault_harness.push_random_weights(27)
    before = engine.generate(requests, PARAMS)
    pid, restarts = engine.pid, engine.num_restarts
    engine.call_timeout_s = 15  # enough for a call of the new process, too
    os.kill(pid, signal.SIGSTOP)
    try:
        assert engine.generate(requests, PARAMS) == before
    finally:
        engine.call_timeout_s = 600
    assert engine.num_restarts == restarts + 1
    assert session_members(pid) == []
    assert "is replaced" in caplog.text
    assert "generate did not end within 15.0 seconds" in caplog.text


@pytest.mark.slow
def test_process_that_is_lost_while_it_should_sleep_or_wake_is_replaced(fault_harness):
    engine, requests = fault_harness.engine, make_requests(2)
    fault_harness.push_random_weights(28)
    before = engine.generate(requests, PARAMS)
    os.kill(engine.pid, signal.SIGKILL)
    assert engine.sleep(1) == 0  # it holds nothing any more
    engine.wake(["weights"])
    os.kill(engine.pid, signal.SIGKILL)
    assert engine.generate(requests, PARAMS) == before
    engine.sleep(1)
    os.kill(engine.pid, signal.SIGKILL)
    engine.wake()
    assert engine.generate(requests, PARAMS) == before


def test_model_directory_that_has_vanished_is_named(tied_model_dir, tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(tied_model_dir, directory)
    engine = make_engine()
    engine.start(directory)
    try:
        shutil.rmtree(directory)
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match=rf"killed by SIGKILL.*{directory} has vanished or changed.*Put it back"):
            engine.wait_ready()
        assert engine.num_restarts == 0
    finally:
        engine.close()


@pytest.mark.slow
def test_deadline_kills_and_the_last_restart_is_not_exceeded(fault_harness):
    engine = fault_harness.engine
    requests = make_requests(32, num_generations=4)
    before = engine.generate(requests[:2], PARAMS)
    pid, restarts = engine.pid, engine.num_restarts
    engine.call_timeout_s, engine.max_restarts = 0.3, restarts
    try:
        with pytest.raises(RuntimeError, match=r"(?s)gives up.* generate did not end within 0\.3 seconds"):
            engine.generate(requests, SamplingParams(max_tokens=256, ignore_eos=True))
        assert session_members(pid) == []
        with pytest.raises(RuntimeError, match=rf"(?s)max_restarts={restarts} .* generate did not end within"):
            engine.generate(requests[:2], PARAMS)
    finally:
        engine.call_timeout_s, engine.max_restarts = 600, 100
    assert engine.generate(requests[:2], PARAMS) == before
    assert engine.num_restarts == restarts + 1


@pytest.mark.slow
def test_update_that_never_was_complete_leaves_the_old_weights(fault_harness):
    engine, requests = fault_harness.engine, make_requests(4)
    fault_harness.push_random_weights(23)
    before = engine.generate(requests, PARAMS)
    others = [(name, tensor + 1) for name, tensor in fault_harness.model.state_dict().items()]

    def breaks_off():
        yield from others[:10]
        raise ZeroDivisionError("gathering failed")

    with pytest.raises(ZeroDivisionError, match="gathering failed"):
        engine.update_weights(source_of(breaks_off()), 999)
    with pytest.raises(ValueError, match="weights are missing from the update"):
        engine.update_weights(source_of(others[:10]), 999)
    assert engine.weight_version == fault_harness.version
    assert engine.generate(requests, PARAMS) == before

    # The old weights lived in the killed process alone: sampling with anything else would be silently wrong.
    restarts = engine.num_restarts
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(
        RuntimeError, match=rf"version {fault_harness.version} went with the engine's process.*update_weights"
    ):
        engine.generate(requests, PARAMS)
    fault_harness.push_random_weights(24)
    assert engine.num_restarts == restarts + 1
    assert max_logprob_error(fault_harness.model, requests, engine.generate(requests, PARAMS)) <= TOLERANCE


@pytest.mark.slow
def test_update_that_fails_inside_vllm_never_samples(fault_harness):
    """A failed reload leaves layers without weights behind. The check of the shapes is taken away to get there."""
    engine, requests = fault_harness.engine, make_requests(2)
    layout, check, restarts = engine._layout, engine._check, engine.num_restarts
    weights = random_weights(fault_harness.model, 25)
    name = "model.layers.2.mlp.down_proj.weight"
    wrong = [(n, tensor[:, :-1] if n == name else tensor) for n, tensor in weights if n != "lm_head.weight"]
    shapes = layout.shapes | {name: tuple(dict(wrong)[name].shape)}
    engine._check = SourceCheck(CheckpointLayout(shapes, layout.dtype, layout.is_tied))
    engine.max_restarts = restarts
    try:
        with pytest.raises(RuntimeError, match=r"(?s)gives up.*update_weights failed in the engine's process"):
            engine.update_weights(source_of(wrong), 999)
        assert engine.weight_version == fault_harness.version
        with pytest.raises(RuntimeError, match="gives up"):
            engine.generate(requests, PARAMS)
    finally:
        engine._check, engine.max_restarts = check, 100
    fault_harness.push_random_weights(26)
    assert engine.num_restarts == restarts + 1
    assert max_logprob_error(fault_harness.model, requests, engine.generate(requests, PARAMS)) <= TOLERANCE


def test_start_that_fails_says_why_and_is_not_repeated(model_dir):
    engine = make_engine(max_model_len=4096)
    engine.start(model_dir)
    pid = engine.pid
    with pytest.raises(
        EngineCallError, match=r"(?s)start failed .*max_model_len \(4096\).*max_position_embeddings=1024"
    ):
        engine.wait_ready()
    assert engine.num_restarts == 0
    assert session_members(pid) == []
    engine.close()


# A trainer that owns an engine, and a child (such as a data-loader worker) that inherited its file descriptors.
TRAINER = """
import os, sys, time
from lightning_megatron_rl.rollout import GenerationRequest, SamplingParams, VLLMEngine
engine = VLLMEngine(max_model_len=512, kv_cache_memory_gb=0.25, num_threads=1)
engine.start(sys.argv[1])
if sys.argv[2] == "sampling":
    engine.wait_ready()
fork = os.fork()
if fork == 0:
    time.sleep(600)
print(engine.pid, fork, "vllm" in sys.modules, flush=True)
requests = [GenerationRequest([7 + i] * 150, seed=i, num_generations=8) for i in range(64)]
engine.generate(requests, SamplingParams(max_tokens=300, ignore_eos=True))
"""


@pytest.mark.parametrize("phase", ["starting", pytest.param("sampling", marks=pytest.mark.slow)])
def test_kill_minus_9_of_the_trainer_leaves_nothing(model_dir, phase):
    before = shared_memory()
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(model_dir), phase],
        cwd=ROOT,
        env=dict(os.environ) | {"PYTHONPATH": CHILD_PATH},
        stdout=subprocess.PIPE,
        text=True,
    )
    pid = fork = None
    try:
        watchdog = threading.Timer(120, trainer.kill)
        watchdog.start()
        pid, fork, imported_vllm = trainer.stdout.readline().split()
        watchdog.cancel()
        pid, fork = int(pid), int(fork)
        assert imported_vllm == "False"
        assert is_running(pid)
        time.sleep(0.5)  # into the call
        trainer.kill()
        trainer.wait()
        deadline = time.monotonic() + 10  # at once, or at the end of a second if it is still importing
        while session_members(pid):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert is_running(fork), "the end of file must not be what ended the engine"
        assert leaked_memory(before) == []
    finally:
        trainer.kill()
        trainer.wait()
        trainer.stdout.close()
        if pid is not None and fork is not None:
            for left_over in (fork, *session_members(pid)):
                os.kill(left_over, signal.SIGKILL)
