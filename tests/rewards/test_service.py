"""Rewards over HTTP against servers on this machine: right, slow, down, and talking nonsense."""

import datetime
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from lightning_megatron_rl.rewards import GuardedReward, HTTPReward, RewardSetupError, VLLMRewardModel, compute_rewards
from tests.notices import told
from tests.rewards.samples import make_sample

Answer = Callable[[dict[str, Any]], tuple[int, bytes]]


@contextmanager
def serve(answer: Answer) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that answers every POST; gives its address and a list of the requests' bodies, path and headers."""
    seen: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append({"path": self.path, "headers": dict(self.headers), "body": body})
            status, text = answer(body)
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)
            except OSError:  # the client has given up
                pass

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def lengths(body: dict[str, Any]) -> tuple[int, bytes]:
    return 200, json.dumps({"rewards": [len(sample["response"]) for sample in body["samples"]]}).encode()


def test_service_gets_all_and_the_order_is_kept(monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", "t0ken")
    samples = [make_sample("x" * size, "7", index=size) for size in range(10)]
    samples[3].prompt.columns["level"] = 5
    with serve(lengths) as (url, seen):
        reward = HTTPReward(url + "/score?model=a", batch_size=4, token_variable="JUDGE_TOKEN")
        assert reward(samples) == [float(size) for size in range(10)]
    assert sorted(len(request["body"]["samples"]) for request in seen) == [2, 4, 4]
    assert {request["path"] for request in seen} == {"/score?model=a"}
    assert {request["headers"]["Authorization"] for request in seen} == {"Bearer t0ken"}
    (third,) = [sample for request in seen for sample in request["body"]["samples"] if sample["index"] == 3]
    assert third == {
        "prompt": "1+1=", "response": "xxx", "answer": "7", "dataset": "train", "index": 3,
        "columns": {"level": 5}, "num_tokens": 3, "turns": [], "truncated": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("status", "text", "message"),
    [
        (500, b"overloaded", "status 500: 'overloaded'"),
        (302, b"", "status 302"),
        (200, b"<html>", "answered '<html>': JSONDecodeError"),
        (200, b'{"scores": [1, 2]}', "KeyError: 'rewards'"),
        (200, b"[1, 2]", "TypeError"),
        (200, b'{"rewards": [1]}', "not 2 numbers for as many samples"),
        (200, b'{"rewards": 1}', "not 2 numbers"),
        (200, b'{"rewards": [1, "2"]}', "something in it is not a number"),
        (200, b'{"rewards": [1, null]}', "something in it is not a number"),
        (200, b'{"rewards": [1, true]}', "something in it is not a number"),
        (200, b"\xff\xfe", "answered"),
    ],
)
def test_nonsense_is_named(status, text, message):
    with serve(lambda body: (status, text)) as (url, _), pytest.raises(RuntimeError, match=message) as caught:
        HTTPReward(url)([make_sample("a"), make_sample("b")])
    assert url in str(caught.value)


def test_nonsense_for_one_sample_costs_that_one():
    def answer(body: dict[str, Any]) -> tuple[int, bytes]:
        values = ["NaN" if s["response"] == "nan" else "1.0" for s in body["samples"]]
        if any(s["response"] == "crash" for s in body["samples"]):
            return 500, b"KeyError"
        return 200, f'{{"rewards": [{", ".join(values)}]}}'.encode()

    samples = [make_sample("crash" if i == 5 else "nan" if i == 8 else "fine", index=i) for i in range(20)]
    with serve(answer) as (url, _), told("'http' failed on 2 of 20 samples") as caught:
        compute_rewards(samples, [HTTPReward(url, batch_size=10)])
    assert [i for i, sample in enumerate(samples) if sample.reward != 1.0] == [5, 8]
    assert "status 500" in samples[5].reward_errors["http"]
    assert "returned nan" in samples[8].reward_errors["http"]
    assert "prompt 5" in caught[0]


def test_service_that_is_down_does_not_stop_the_run():
    with serve(lengths) as (url, _):
        pass  # gone
    samples = [make_sample("a", index=i) for i in range(5)]
    with told("failed on 5 of 5 samples.*ConnectionRefusedError.*is the service running"):
        compute_rewards(samples, [GuardedReward(HTTPReward(url), default=-1.0)])
    assert [sample.reward for sample in samples] == [-1.0] * 5
    with pytest.raises(RuntimeError, match="ConnectionRefusedError"):
        compute_rewards(samples, [GuardedReward(HTTPReward(url), on_error="raise")])


def test_slow_service_costs_no_more_than_the_deadline():
    release = threading.Event()

    def answer(body: dict[str, Any]) -> tuple[int, bytes]:
        if any(sample["response"] == "slow" for sample in body["samples"]):
            release.wait(30)
        return lengths(body)

    samples = [make_sample("slow" if i == 3 else "ok", index=i) for i in range(8)]
    with serve(answer) as (url, _):
        with told("prompt 3 .*did not answer within timeout_s=0.3"):
            compute_rewards(samples, [HTTPReward(url, timeout_s=0.3)])
        started = time.monotonic()
        with told("DeadlineError"):
            scores = GuardedReward(HTTPReward(url, timeout_s=2.0), deadline_s=0.5)(samples)
        assert time.monotonic() - started < 10  # two deadlines of 0.5 s, on a busy machine
        release.set()
        time.sleep(2.0)  # the abandoned requests run into their own limit
    assert [sample.reward for sample in samples] == [2.0, 2.0, 2.0, 0.0, 2.0, 2.0, 2.0, 2.0]
    assert scores == [2.0, 2.0, 2.0, 0.0, 2.0, 2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "localhost:8000"}, "give http://host:port"),
        ({"url": "ftp://host/x"}, "give http://host:port"),
        ({"url": "http://host:80800/x"}, "url='http://host:80800/x' .* Port out of range"),
        ({"url": "http://[::1/x"}, "of the reward 'http'"),
        ({"url": "http://user:secret@host/x"}, "holds a password. Name token_variable"),
        ({"url": "http://host", "batch_size": 0}, "batch_size=0"),
        ({"url": "http://host", "timeout_s": 0.0}, "timeout_s=0.0"),
    ],
)
def test_settings_are_checked(options, message):
    with pytest.raises(ValueError, match=message) as caught:
        HTTPReward(**options)
    assert "secret" not in str(caught.value)


def test_token_that_is_not_set_is_named():
    with pytest.raises(RewardSetupError, match="environment variable NO_SUCH_TOKEN, which is not set"):
        GuardedReward(HTTPReward("http://127.0.0.1:9", token_variable="NO_SUCH_TOKEN"))([make_sample("a")])


def test_columns_that_are_no_json_end_the_run():
    """Each sample failed and got the default."""
    sample = make_sample("a")
    sample.prompt.columns["when"] = datetime.date(2026, 1, 1)
    with pytest.raises(RewardSetupError, match=r"'http' .* a column of the data is none .*date"):
        GuardedReward(HTTPReward("http://127.0.0.1:9"))([sample])


@pytest.mark.parametrize("inputs", ["tokens", "text"])
def test_request_to_a_reward_model(inputs):
    """The form of vLLM's /classify; `test_reward_model.py` asks vLLM itself."""

    def answer(body: dict[str, Any]) -> tuple[int, bytes]:
        rows = [{"index": i, "probs": [float(len(item))]} for i, item in enumerate(body["input"])]
        return 200, json.dumps({"data": rows[::-1]}).encode()

    with serve(answer) as (url, seen):
        scores = VLLMRewardModel(url + "/", model="rm", inputs=inputs)([make_sample("abc"), make_sample("b")])
    (request,) = seen
    assert request["path"] == "/classify"
    sequences = {"tokens": [[5, 0, 1, 2], [5, 0]], "text": ["1+1=abc", "1+1=b"]}[inputs]
    assert request["body"] == {"input": sequences, "use_activation": False, "model": "rm"}
    assert scores == [float(len(sequence)) for sequence in sequences]


def test_classifier_with_several_labels_is_no_reward_model():
    reply = json.dumps({"data": [{"index": 0, "probs": [0.2, 0.8]}]}).encode()
    with serve(lambda body: (200, reply)) as (url, _), pytest.raises(RuntimeError, match="2 labels"):
        VLLMRewardModel(url)([make_sample("a")])
    with pytest.raises(ValueError, match="inputs='ids'"):
        VLLMRewardModel("http://host", inputs="ids")
