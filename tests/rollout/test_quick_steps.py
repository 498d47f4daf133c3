"""What is left out of vLLM's steps changes nothing."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ASYNC = "vllm.v1.core.sched.async_scheduler.AsyncScheduler"  # a GPU's
FUZZED = {"max_num_batched_tokens": 160, "max_num_seqs": 12}


@pytest.fixture(scope="module")
def found(model_dir) -> list[dict[str, Any]]:
    """What both schedulers do, and what is not known to `quicken`."""
    settings = [{}, {"scheduler_cls": ASYNC, "ahead": True}, {"enable_prefix_caching": False}]
    return run_apart(model_dir, [*settings, {"fuzzed": 4, **FUZZED}])


def run_apart(model_dir: Path, settings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each of the settings gives, in a process of their own."""
    command = [sys.executable, "-m", "tests.rollout.quick_steps", str(model_dir), "cpu", json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize(("place", "name"), enumerate(["Scheduler", "AsyncScheduler"]))
def test_plans_responses_and_cache_are_those_of_vllms_own_steps(found, place, name):
    """Also where responses are put off because the cache is full, and where log-probs are kept with texts."""
    run = found[place]
    assert run["scheduler"] == name
    assert run["quick"]
    assert run["different_plan"] is None
    assert run["same_number_of_plans"]
    assert run["plans"] > 100
    assert run["different_responses"] == 0
    assert run["same_cache"]
    assert run["cached"] > 20
    assert run["preempted"] > 0
    assert run["tokens"] == 3 * sum(1 + 9 * k for k in range(12))


@pytest.mark.parametrize("place", [0, 1])
def test_most_questions_are_left_out(found, place):
    assert found[place]["asked"] < 0.6 * found[place]["asked_before"]


@pytest.mark.parametrize("place", [0, 1])
def test_tokens_are_noted_that_end_nothing(found, place):
    """Handed on are those of the three responses with texts, and of the others the first and the last."""
    with_texts, others = 3 * 100, 3 * 11
    one_token = 3  # the first is the last
    handed_on = with_texts + 2 * others - one_token
    # one that is put off may have a token under way, and its next comes when it is computed anew
    assert handed_on <= found[place]["handed_on"] <= handed_on + 2 * found[place]["preempted"]


def test_vllm_stays_as_it_is_where_its_steps_are_others(found):
    assert not found[2]["quick"]
    assert found[2]["handed_on"] == found[2]["tokens"]
    assert found[2]["asked"] == found[2]["asked_before"]


def test_whatever_happens_schedulers_say_the_same(found):
    """Of both kinds, for both of vLLM's model runners: see quick_plans."""
    check_plans(found[3]["quick_plans"], 16)


@pytest.mark.slow
@pytest.mark.deadline(250)
def test_much_more_happens(model_dir):
    (found,) = run_apart(model_dir, [{"fuzzed": 40, **FUZZED}])
    check_plans(found["quick_plans"], 160)


def check_plans(quick: list[tuple[int, int]], runs: int) -> None:
    assert len(quick) == runs
    assert all(plans > 50 and tokens > 500 for plans, tokens in quick)  # of 400 steps each
