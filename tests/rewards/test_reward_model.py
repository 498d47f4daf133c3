"""`VLLMRewardModel` against a real vLLM pooling server, and that against Transformers."""

import os
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
import torch

from lightning_megatron_rl.rewards import VLLMRewardModel
from lightning_megatron_rl.sample import Prompt, Sample
from tests.tiny_models import VOCAB_SIZE, make_tokenizer

TOLERANCE = 1e-4  # fp32 on both sides, other kernels; scores are of order 1


@pytest.mark.slow  # a server takes 30 to 90 s to start
def test_scores_are_those_of_transformers(tmp_path):
    from transformers import AutoModelForSequenceClassification, Qwen2Config

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_labels=1, pad_token_id=0, max_position_embeddings=256, initializer_range=0.2,
    )  # fmt: skip
    model = AutoModelForSequenceClassification.from_config(config).eval()
    model.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tmp_path), "--runner", "pooling",
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "128", "--enforce-eager",
        "--kv-cache-memory-bytes", str(2**28),
    ]  # fmt: skip
    environment = {
        **os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1",
    }  # fmt: skip
    with (tmp_path / "server.log").open("wb") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            wait_until_up(server, port, tmp_path / "server.log")
            generator = torch.Generator().manual_seed(1)
            samples = []
            for size in (3, 9, 17):
                ids = torch.randint(6, VOCAB_SIZE, (size,), generator=generator).tolist()
                samples.append(Sample(Prompt(ids[:2], "p"), ids[2:], [-1.0] * (size - 2)))
            scores = VLLMRewardModel(f"http://127.0.0.1:{port}")(samples)
        finally:
            server.terminate()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
    with torch.no_grad():
        expected = [
            model(torch.tensor([sample.prompt.token_ids + sample.response_ids])).logits.item() for sample in samples
        ]
    assert scores == pytest.approx(expected, abs=TOLERANCE)
    assert len(set(scores)) == 3


def wait_until_up(server: subprocess.Popen, port: int, log) -> None:
    patience = time.monotonic() + 240
    while time.monotonic() < patience:
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
            return
        except OSError:
            time.sleep(0.5)
    pytest.fail(log.read_text()[-3000:])
