"""A rollout engine of your own: Transformers instead of vLLM, in the trainer's process, slow and easy to look into.

With ``PYTHONPATH=examples/extending`` and this overlay:

.. code-block:: yaml

    model:
      init_args:
        engine: {class_path: engine.TransformersEngine, init_args: {max_model_len: 64}}
"""

import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from lightning_megatron_rl.rollout import Generation, GenerationRequest, RolloutEngine, SamplingParams
from lightning_megatron_rl.rollout.protocol import SyncReport, check_requests
from lightning_megatron_rl.weights.source import WeightSource


class TransformersEngine(RolloutEngine):
    """Draws token by token, without a cache, from a Transformers model on the CPU.

    Args:
        max_model_len: Longest prompt plus response. # [tokens]
    """

    def __init__(self, max_model_len: int = 64) -> None:
        self.max_model_len = max_model_len
        self.weight_version = 0  # of the weights that sample: 0 is what `start` loads
        self._model: PreTrainedModel | None = None

    def start(self, model_path: str | Path) -> None:
        """Load the model; vLLM's engines return at once and load beside the trainer."""
        self._model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()

    def wait_ready(self) -> None:
        """Ready since `start`."""

    def generate(self, requests: list[GenerationRequest], params: SamplingParams) -> list[list[Generation]]:
        """Return `num_generations` responses to each prompt, with log-probs of the distribution that they come from."""
        assert self._model is not None, "start() comes first"
        vocab_size = self._model.config.get_text_config().vocab_size
        check_requests(requests, params, vocab_size=vocab_size, max_model_len=self.max_model_len)
        if params.top_p < 1 or params.top_k > 0 or params.stop:
            raise ValueError(f"{params}: this engine knows temperature and max_tokens alone")
        return [
            [self._draw(request, params, request.seed + number) for number in range(request.num_generations)]
            for request in requests
        ]

    @torch.no_grad()
    def _draw(self, request: GenerationRequest, params: SamplingParams, seed: int) -> Generation:
        assert self._model is not None
        generator = torch.Generator().manual_seed(seed)
        ends = self._model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        tokens: list[int] = []
        logprobs: list[float] = []
        while len(tokens) < (request.max_tokens or params.max_tokens):
            logits = self._model(torch.tensor([request.token_ids + tokens])).logits[0, -1].float()
            log_p = (logits / (params.temperature or 1.0)).log_softmax(-1)
            token = int(
                torch.multinomial(log_p.exp(), 1, generator=generator) if params.temperature else log_p.argmax()
            )
            tokens.append(token)
            logprobs.append(float(log_p[token]))
            if token in ends and not params.ignore_eos:
                return Generation(tokens, logprobs, "stop")
        return Generation(tokens, logprobs, "length")

    @torch.no_grad()
    def update_weights(self, source: WeightSource, version: int) -> SyncReport:
        """Copy the trainer's weights, which come under their Hugging Face names."""
        assert self._model is not None
        began, own, num_bytes = time.perf_counter(), self._model.state_dict(keep_vars=True), 0
        for name, tensor in source.tensors():
            own[name].copy_(tensor)
            num_bytes += tensor.nbytes
        self.weight_version = version
        return SyncReport(num_bytes, time.perf_counter() - began, extra_bytes=0, transport="in process")

    def close(self) -> None:
        """Forget the model."""
        self._model = None
