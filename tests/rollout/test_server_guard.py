"""The guard before a server's routes, and what a trainer checks of servers; without vLLM."""

import asyncio
import http.server
import json
import shutil
import socket
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from lightning_megatron_rl.rollout.protocol import SamplingParams, StreamRequest
from lightning_megatron_rl.rollout.servers.about import About, check_about, fingerprint, tokenizer_kind
from lightning_megatron_rl.rollout.servers.client import READY, ServerClient
from lightning_megatron_rl.rollout.servers.engine import VLLMServers
from lightning_megatron_rl.rollout.servers.flights import SLACK, Board, Flight, choose_server
from lightning_megatron_rl.rollout.servers.guard import LEASE_S, Guard, token_digest
from lightning_megatron_rl.rollout.servers.push import choose_backend
from lightning_megatron_rl.utilities.masking import MASK, is_secret_name, mask_text
from lightning_megatron_rl.utilities.run_settings import describe_settings
from lightning_megatron_rl.weights.source import source_of
from tests.rollout.server_process import TOKEN, guarded

ABOUT = About("0.1.0", "0.26.0", "/models/a", "f" * 16, "float32", 512, 128, 1, "cpu", "one")
PARAMS = SamplingParams(max_tokens=10)


# ---- the guard -----------------------------------------------------------------------------------------------------


class Asked:
    """A guard before an app that notes what reaches it, and a clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.reached: list[str] = []
        settings = {"digest": token_digest(TOKEN), "about": {"instance": "one"}}
        self.guard = Guard(self._app, settings, lambda: self.now)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        self.reached.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    def __call__(
        self,
        method: str,
        path: str,
        run: str | None = "a",
        authorization: str | None = f"Bearer {TOKEN}",
        body: str = "",
    ) -> int:
        found = {"authorization": authorization, "x-run": run}
        headers = [(name.encode(), value.encode("latin-1")) for name, value in found.items() if value is not None]
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body.encode()}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": method, "path": path, "headers": headers}
        asyncio.run(self.guard(scope, receive, send))
        return int(sent[0]["status"])


@pytest.fixture
def ask() -> Asked:
    return Asked()


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer ", "Bearer wrong", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}",
     f"Bearer {token_digest(TOKEN)}", "Bearer \xe9"],
)  # fmt: skip
def test_without_the_token_nothing_is_reached(ask, authorization):
    for method, path in (("GET", "/health"), ("POST", "/lease"), ("GET", "/about"), ("POST", "/pause"), ("GET", "/x")):
        assert ask(method, path, authorization=authorization) == 401
    assert ask.reached == []


def test_only_known_routes_are_reached(ask):
    assert ask("POST", "/lease") == 200
    for method, path in (
        ("GET", "/v1/models"), ("POST", "/v1/chat/completions"), ("GET", "/pause"), ("POST", "/sleep"),
        ("POST", "/pause/"), ("POST", "//pause"), ("POST", "/health"), ("GET", "/docs"), ("POST", "/load_lora_adapter"),
    ):  # fmt: skip
        assert ask(method, path) == 404, path
    assert ask.reached == []
    assert ask("POST", "/inference/v1/generate") == 200
    assert ask.reached == ["/inference/v1/generate"]


def test_weights_are_one_trainers_at_a_time(ask):
    assert ask("POST", "/pause") == 409  # nobody has the lease
    assert ask("POST", "/lease", "a", body="node-1, process 7") == 200
    assert ask("POST", "/pause", "a") == 200
    assert ask("POST", "/lease", "b") == 409
    assert ask("POST", "/pause", "b") == 409
    assert ask("DELETE", "/lease", "b") == 409
    assert ask("POST", "/pause", None) == 409
    ask.now = LEASE_S - 0.1
    assert ask("POST", "/lease", "a") == 200
    ask.now += LEASE_S - 0.1
    assert ask("POST", "/lease", "b") == 409
    ask.now += 0.2  # a has not been heard of for too long
    assert ask("POST", "/pause", "a") == 409
    assert ask("POST", "/lease", "b") == 200
    assert ask("DELETE", "/lease", "b") == 200
    assert ask("POST", "/lease", "a") == 200


def test_websockets_are_closed(ask):
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(ask.guard({"type": "websocket", "path": "/v1/realtime", "headers": []}, None, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]
    assert ask.reached == []


# ---- what a trainer checks -----------------------------------------------------------------------------------------


def check(about: About) -> None:
    check_about(about, "http://a:1", "/models/a", "f" * 16, 512)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": "0.0.9"}, r"http://a:1 runs lightning-megatron-rl 0\.0\.9, the trainer 0\.1\.0"),
        ({"vllm": "0.27.1"}, r"http://a:1 runs vLLM 0\.27\.1, this version works with vLLM 0\.26\.0"),
        ({"fingerprint": "0" * 16}, r"has another model, /models/a \(0{16}\), than the trainer's /models/a \(f{16}\)"),
        ({"max_model_len": 64}, r"takes prompt and response of 64 tokens together.*max_model_len=512"),
    ],
)
def test_server_that_is_no_use_is_named(change, words):
    check(ABOUT)
    with pytest.raises(ValueError, match=words):
        check(replace(ABOUT, **change))


def test_nccl_wants_servers_with_gpus():
    on_gpus = replace(ABOUT, device="cuda")
    check_about(on_gpus, "http://a:1", "/models/a", "f" * 16, 512, "nccl")
    with pytest.raises(
        ValueError, match=r"weights_over='nccl': the workers of the server http://a:1 are on cpu\. NCCL"
    ):
        check_about(ABOUT, "http://a:1", "/models/a", "f" * 16, 512, "nccl")


@pytest.mark.parametrize(
    ("weights_over", "device", "backend"),
    [("auto", "cuda", "gloo"), ("gloo", "cuda", "gloo"), ("nccl", "cuda", "nccl"), ("nccl", "cpu", "gloo")],
)
def test_nccl_is_taken_where_it_is_asked_for(weights_over, device, backend):
    connections, source = SimpleNamespace(weights_over=weights_over), SimpleNamespace(device=torch.device(device))
    assert choose_backend(connections, source) == backend


def test_fingerprint_is_of_the_kind_of_model(qwen3_dir, tied_dir, tmp_path):
    copied = tmp_path / "copy"
    shutil.copytree(qwen3_dir, copied)
    config = (copied / "config.json").read_text()
    (copied / "config.json").write_text(config.replace('"transformers_version": "', '"transformers_version": "9.'))
    assert fingerprint(copied) == fingerprint(qwen3_dir) != fingerprint(tied_dir)
    (copied / "config.json").write_text(config.replace('"rms_norm_eps": ', '"rms_norm_eps": 1'))
    assert fingerprint(copied) != fingerprint(qwen3_dir)


def start(urls: list[str], model: Path, **settings: Any) -> None:
    engine = VLLMServers(urls, **{"token": TOKEN, "max_model_len": 512, "start_timeout_s": 1.0, **settings})
    try:
        engine.start(model)
    finally:
        engine.close()


def test_refusals_of_a_real_connection(qwen3_dir):
    about = replace(ABOUT, fingerprint=fingerprint(qwen3_dir)).to_plain()
    with ExitStack() as stack:
        good = stack.enter_context(guarded(about))
        other = stack.enter_context(guarded(about | {"vllm": "0.27.1"}))
        odd = stack.enter_context(guarded({"hello": 1}))
        start([good], qwen3_dir)
        with pytest.raises(ValueError, match=f"{good} refuses the token"):
            start([good], qwen3_dir, token="another-token-0123456789")
        with pytest.raises(ValueError, match=f"{other} runs vLLM"):
            start([good, other], qwen3_dir)
        with pytest.raises(ValueError, match=rf"{odd} answers /about with .*`lightning-megatron-rl serve`"):
            start([odd], qwen3_dir)
        start([good], qwen3_dir)  # its lease was given back each time


def test_nccl_wants_a_trainer_with_a_gpu(qwen3_dir, monkeypatch):
    """Before anything is asked of a server, and where weights are elsewhere than the GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        ValueError, match=r"weights_over='nccl': the trainer has no GPU\. .*set weights_over to auto or gloo"
    ):
        start(["http://127.0.0.1:1"], qwen3_dir, weights_over="nccl")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    about = replace(ABOUT, fingerprint=fingerprint(qwen3_dir), device="cuda").to_plain()
    with guarded(about) as url:
        engine = VLLMServers([url], TOKEN, max_model_len=512, weights_over="nccl")
        engine.start(qwen3_dir)
        try:
            with pytest.raises(ValueError, match="weights_over='nccl': the trainer's weights are on cpu"):
                engine.update_weights(source_of([("a", torch.zeros(2))]), 1)
        finally:
            engine.close()


def test_plain_server_is_named(qwen3_dir, tmp_path):
    """One that has neither the guard nor what it answers."""
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with pytest.raises(ValueError, match=r"has no /about: plain vLLM, or another program\. Start it by"):
                start([f"http://127.0.0.1:{server.server_port}"], qwen3_dir)
        finally:
            server.shutdown()
            thread.join()


def test_a_proxy_that_leads_elsewhere_is_named(qwen3_dir):
    """From http to https, most often. Whoever follows leaves the token behind, which a server refuses then."""
    about = replace(ABOUT, fingerprint=fingerprint(qwen3_dir)).to_plain()
    with ExitStack() as stack:
        url = stack.enter_context(guarded(about))

        class Redirect(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(301)
                self.send_header("Location", url + self.path)
                self.end_headers()

        proxy = stack.enter_context(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Redirect))
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        stack.callback(thread.join)
        stack.callback(proxy.shutdown)
        with pytest.raises(
            ValueError, match=rf":{proxy.server_port} leads to {url}/about, and the token .* give that one"
        ):
            start([f"http://127.0.0.1:{proxy.server_port}"], qwen3_dir)


def test_unreachable_server_is_named(qwen3_dir):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=rf"http://127\.0\.0\.1:{port} does not answer.*engine\.start_timeout_s"):
        start([f"http://127.0.0.1:{port}"], qwen3_dir)
    assert time.monotonic() - began < 10.0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"urls": []}, "give a list of one URL or more"),
        ({"urls": ["node-1:8000"]}, "'node-1:8000' is no address of a server"),
        ({"urls": ["http://a:1/v1"]}, "is no address of a server"),
        ({"urls": ["http://a:1#b"]}, "is no address of a server"),
        ({"urls": [" http://a:1"]}, "is no address of a server"),
        ({"urls": ["http://a:80000"]}, r"is no address of a server.* a port in \[1, 65535\]"),
        ({"urls": ["http://a:0"]}, r"is no address of a server.* a port in \[1, 65535\]"),
        ({"urls": ["http://[::1:8000"]}, "is no address of a server.* an IPv6 address in brackets"),
        ({"urls": ["http://::1:8000"]}, "is no address of a server.* an IPv6 address in brackets"),
        ({"urls": ["http://user:pass@a:1"]}, r"a URL with a password in it \(a\)"),
        ({"urls": ["http://user:pass@a:1/v1"]}, r"a URL with a password in it \(a\)"),
        ({"urls": ["http://a:1", "http://a:1/"]}, "one of them is there twice"),
        ({"urls": ["http://a:1"], "token": "x", "token_file": "y"}, "give one of them"),
        ({"urls": ["http://a:1"], "max_model_len": 1}, "max_model_len=1 must be at least 2"),
        ({"urls": ["http://a:1"], "weights_over": "tcp"}, "engine.weights_over='tcp': choose one of auto, gloo, nccl"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        VLLMServers(**settings)


def test_token_comes_from_a_private_file_or_the_environment(qwen3_dir, tmp_path, monkeypatch):
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o644)
    monkeypatch.delenv("LIGHTNING_MEGATRON_RL_TOKEN", raising=False)
    with pytest.raises(ValueError, match=f"can be read by others: chmod 600 {file}"):
        start(["http://a:1"], qwen3_dir, token=None, token_file=str(file))
    with pytest.raises(ValueError, match=r"without a token.*LIGHTNING_MEGATRON_RL_TOKEN"):
        start(["http://a:1"], qwen3_dir, token=None)
    file.chmod(0o600)
    with guarded(replace(ABOUT, fingerprint=fingerprint(qwen3_dir)).to_plain()) as url:
        start([url], qwen3_dir, token=None, token_file=str(file))
        monkeypatch.setenv("LIGHTNING_MEGATRON_RL_TOKEN", TOKEN)
        start([url], qwen3_dir, token=None)


@pytest.mark.parametrize(
    "settings",
    [{"token": None}, {"token_file": "token"}, {"token": MASK}, {"token": None, "token_file": "token"}, {}],
)
def test_errors_about_the_token_are_whole_where_secrets_are_masked(qwen3_dir, settings, monkeypatch):
    """The command line shows no secret: what follows "token:" is one to it."""
    monkeypatch.delenv("LIGHTNING_MEGATRON_RL_TOKEN", raising=False)
    about = replace(ABOUT, fingerprint=fingerprint(qwen3_dir)).to_plain()
    with guarded(about) as url, pytest.raises(ValueError, match="token") as error:
        start([url], qwen3_dir, **{"token": "another-token-0123456789", **settings})
    assert mask_text(str(error.value)) == str(error.value)


def test_a_token_that_was_masked_comes_from_the_environment(qwen3_dir, monkeypatch):
    """As in a config that a run has written, with which one goes on; where its file is, is no secret."""
    assert not is_secret_name("token_file")
    monkeypatch.delenv("LIGHTNING_MEGATRON_RL_TOKEN", raising=False)
    with guarded(replace(ABOUT, fingerprint=fingerprint(qwen3_dir)).to_plain()) as url:
        with pytest.raises(ValueError, match=r"engine\.token was masked .* LIGHTNING_MEGATRON_RL_TOKEN"):
            start([url], qwen3_dir, token=MASK)
        monkeypatch.setenv("LIGHTNING_MEGATRON_RL_TOKEN", TOKEN)
        start([url], qwen3_dir, token=MASK)


@pytest.mark.parametrize("token", ["short", "п" * 20, "0123456789 abcdefg"])
def test_token_that_no_server_has_is_refused(qwen3_dir, token):
    with pytest.raises(ValueError, match=r"the token in engine\.token has .* Give the one that the servers were"):
        start(["http://a:1"], qwen3_dir, token=token)


def test_end_of_a_line_is_no_part_of_a_token(qwen3_dir, monkeypatch):
    """Secrets of a cluster are often made with one."""
    monkeypatch.setenv("LIGHTNING_MEGATRON_RL_TOKEN", f"{TOKEN}\n")
    with guarded(replace(ABOUT, fingerprint=fingerprint(qwen3_dir)).to_plain()) as url:
        start([url], qwen3_dir, token=None)


def test_a_server_under_two_names_is_refused(qwen3_dir):
    with guarded(replace(ABOUT, fingerprint=fingerprint(qwen3_dir)).to_plain()) as url:
        other = url.replace("127.0.0.1", "localhost")
        with pytest.raises(ValueError, match=rf"engine\.urls: {url} and {other} are one server: name each once"):
            start([url, other], qwen3_dir)


def test_token_is_in_no_log():
    assert TOKEN not in str(describe_settings(VLLMServers(["http://a:1"], token=TOKEN)))


def test_a_tokenizer_that_ends_responses_elsewhere_is_refused(qwen3_dir, tmp_path):
    kinds = [tokenizer_kind(qwen3_dir)]
    for name, change in {
        "tokenizer_config.json": {"eos_token": "<|im_end|>"},
        "generation_config.json": {"eos_token_id": [1, 7]},
        "tokenizer.json": {"model": {"type": "WordLevel", "vocab": {"<eos>": 1, "a": 2}}},
    }.items():
        other = shutil.copytree(qwen3_dir, tmp_path / name)
        file = other / name
        had = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps(had | change))
        assert fingerprint(other) == fingerprint(qwen3_dir)
        kinds.append(tokenizer_kind(other))
    assert len(set(kinds)) == len(kinds)
    alone = shutil.copytree(qwen3_dir, tmp_path / "alone")
    (alone / "tokenizer.json").unlink()
    assert tokenizer_kind(alone) == ""
    about = replace(ABOUT, fingerprint=fingerprint(qwen3_dir))
    with guarded(replace(about, tokenizer=kinds[0]).to_plain()) as same:
        start([same], qwen3_dir)
        start([same], alone)
    words = r"another tokenizer with /models/a .*end-of-sequence tokens"
    with guarded(replace(about, tokenizer=kinds[1]).to_plain()) as different, pytest.raises(ValueError, match=words):
        start([different], qwen3_dir)


def test_a_tokenizer_that_was_saved_anew_is_the_same(qwen3_dir, tmp_path):
    """As an export writes it: other fields, the same tokens."""
    other = shutil.copytree(qwen3_dir, tmp_path / "other")
    AutoTokenizer.from_pretrained(qwen3_dir).save_pretrained(other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    (other / "tokenizer.json").write_text(json.dumps(tokenizer | {"truncation": None, "padding": None}))
    settings = json.loads((other / "tokenizer_config.json").read_text())
    settings["eos_token"] = {"content": settings["eos_token"], "lstrip": False}
    (other / "tokenizer_config.json").write_text(json.dumps(settings))
    (other / "generation_config.json").write_text(json.dumps({"eos_token_id": [1], "temperature": 0.6}))
    assert tokenizer_kind(other) == tokenizer_kind(qwen3_dir)


# ---- responses under way -------------------------------------------------------------------------------------------


def flight(name: str = "a") -> Flight:
    return Flight(StreamRequest(name, [1, 2, 3], 77, 10), PARAMS)


def test_a_response_goes_on_from_its_tokens_with_other_noise():
    going = flight()
    assert (going.prompt, going.max_tokens, going.seed(1)) == ([1, 2, 3], 10, 77)
    going.add([5, 6], [-1.0, -2.0], None, 1)
    assert (going.prompt, going.max_tokens) == ([1, 2, 3, 5, 6], 8)
    assert len({going.seed(1), going.seed(2), 77}) == 3
    going.add([7], [-3.0], "stop", 2)
    news = going.take_news()
    assert (news.token_ids, news.segments, news.finish_reason) == ([5, 6, 7], [(1, 2), (2, 1)], "stop")


def test_a_response_with_stop_strings_begins_anew_elsewhere():
    """Part of a stop string may have been sampled, which the next server would not find."""
    going = flight()
    going.add([5, 6], [-1.0, -2.0], None, 1)
    going.interrupt()
    assert (going.token_ids, going.news.token_ids) == ([5, 6], [5, 6])
    stops = Flight(going.request, replace(PARAMS, stop=("x",)))
    stops.add([5, 6], [-1.0, -2.0], None, 1)
    stops.interrupt()
    assert (stops.prompt, stops.max_tokens, stops.seed(1)) == ([1, 2, 3], 10, 77)
    stops.add([7], [-3.0], "stop", 1)
    assert stops.take_news().token_ids == [7]


def test_board_tells_complete_responses_first():
    board = Board()
    board.add(flight("a"))
    board.add(flight("b"))
    board.land(board.flights["a"], [4], [-1.0], "length", 1)
    board.land(board.flights["b"], [5], [-1.0], None, 1)
    board.wait(0.0)
    assert [news.name for news in board.take_news(everything=False)] == ["a"]
    assert [news.name for news in board.take_news(everything=True)] == ["b"]
    assert list(board.flights) == ["b"]
    board.fail(RuntimeError("lost"))
    with pytest.raises(RuntimeError, match="lost"):
        board.raise_error()
    board.raise_error()


def test_prompts_that_begin_alike_go_to_one_server_unless_it_is_busy():
    servers = [ServerClient(f"http://a:{port}", TOKEN, "run", 1.0) for port in (1, 2, 3)]
    assert choose_server(servers, [1, 2]) is None
    for server in servers:
        server.state = READY
    beginning = list(range(100))
    home = choose_server(servers, beginning)
    assert choose_server(servers, [*beginning, 7, 8]) is home  # the next turn
    assert len({id(choose_server(servers, [number] * 70)) for number in range(30)}) == 3
    home.load = SLACK + 1
    assert choose_server(servers, beginning) is not home
    home.load = SLACK
    assert choose_server(servers, beginning) is home
