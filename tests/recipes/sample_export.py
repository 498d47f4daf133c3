"""Run by test_whole_way: sample from an export with vLLM, and compare each token's log-prob with Transformers' own."""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_megatron_rl.rollout import GenerationRequest, SamplingParams, VLLMEngine

TOKENS = 12


def main(export: Path) -> None:
    """Print the greatest difference."""
    tokenizer = AutoTokenizer.from_pretrained(export)
    prompts = [tokenizer(text)["input_ids"] for text in ("What is 1 + 1?", "Natalia sold clips")]
    engine = VLLMEngine(max_model_len=128, max_num_seqs=8, kv_cache_memory_gb=0.1, device="cpu", dtype="float32")
    engine.start(export)
    try:
        requests = [GenerationRequest(prompt, seed, 2) for seed, prompt in enumerate(prompts)]
        groups = engine.generate(requests, SamplingParams(max_tokens=TOKENS, ignore_eos=True))
    finally:
        engine.close()
    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).eval()
    worst, tokens = 0.0, 0
    for prompt, group in zip(prompts, groups, strict=True):
        for response in group:
            ids = torch.tensor([[*prompt, *response.token_ids]])
            with torch.no_grad():
                logprobs = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            own = logprobs.gather(1, torch.tensor(response.token_ids)[:, None])[:, 0]
            worst = max(worst, (own - torch.tensor(response.logprobs)).abs().max().item())
            tokens += len(response.token_ids)
    print(json.dumps({"tokens": tokens, "worst": worst}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
