"""Whether Megatron computes a model as Transformers does: both run a random miniature of its config in fp32 on the CPU.

The weights are such that a wrong setting shows: norms are not one and biases not zero, what goes into norms is small
beside a wrong epsilon, attention is sharp, gates reach their clamps, experts' scores are spread out, and sequences are
longer than windows. Beside the log-probs the frequencies of rotary embeddings are compared, of which low ones turn too
slowly for a short sequence.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron_rl.models.families.registry import FAMILIES

TOLERANCE = 1e-4  # of log-probs and entropies per token; reassociated sums in fp32 differ by some 1e-6 to 1e-5
FREQUENCY_TOLERANCE = 1e-5  # relative; powers in fp32, taken in another order
LENGTHS = (192, 61, 33, 2)  # tokens of the sequences
SEEDS = (0, 1, 2)
_SMALL = 3e-3  # root mean square of what goes into some norms: epsilons of 1e-7 and more are 1 % of its square


@dataclass(frozen=True)
class Comparison:
    """How far Megatron is from Transformers on one config.

    Args:
        difference: Largest difference of log-probs and entropies per token; infinite where one is nan.
        frequencies: Largest relative difference of the frequencies of rotary embeddings.
    """

    difference: float
    frequencies: float

    @property
    def agrees(self) -> bool:
        """Whether both are within their tolerance."""
        return self.difference <= TOLERANCE and self.frequencies <= FREQUENCY_TOLERANCE


def compare(small: dict[str, Any], overrides: dict[str, Any] | None = None) -> Comparison:
    """Run a config through Transformers and Megatron; Megatron's parallel state, of one process on the CPU, must be up.

    Two experts whose scores are equal but for rounding may swap places. So weights that disagree are not the last word:
    the others must then all agree.

    Args:
        small: Content of a config.json, small enough for this process.
        overrides: Of Megatron's `TransformerConfig`.

    Raises:
        Exception: Whatever one of the libraries raises for a config that it cannot build or run.
    """
    first, *others = SEEDS
    found = _compare(small, overrides, first)
    if found.agrees or found.frequencies > FREQUENCY_TOLERANCE:
        return found
    again = [_compare(small, overrides, seed) for seed in others]
    if all(other.agrees for other in again):
        return max(again, key=lambda other: other.difference)
    return found


def _compare(small: dict[str, Any], overrides: dict[str, Any] | None, seed: int) -> Comparison:
    from lightning_megatron_rl.models.hf.model import HFModel

    with TemporaryDirectory(prefix="model-probe-") as temporary:
        directory = Path(temporary)
        (directory / "config.json").write_text(json.dumps(small))
        reference = make_reference(directory, seed)
        sequences = _sequences(reference.config.vocab_size, seed)
        expected = [_reference_outputs(reference, sequence) for sequence in sequences]
        reference.save_pretrained(directory)
        (directory / "config.json").write_text(json.dumps(small))  # in its own words, not as Transformers writes it
        model = HFModel(str(directory), verify=None)
        (chunk,) = model.build_chunks(
            params_dtype=torch.float32,
            layer_backend="torch",
            device=torch.device("cpu"),
            sequence_parallel=False,
            config_overrides=overrides,
        )
        chunk.eval()
        found = _megatron_outputs(chunk, sequences, reference.config.vocab_size, model.logit_cap)
        difference = max((ours - theirs).abs().max().item() for ours, theirs in zip(found, expected, strict=True))
        finite = all(bool(output.isfinite().all()) for output in (*found, *expected))
        frequencies = _frequency_difference(_frequencies(chunk), _reference_frequencies(reference))
        return Comparison(difference if finite else float("inf"), frequencies)


# ---- Transformers ----------------------------------------------------------------------------------------------------


def make_reference(directory: Path, seed: int) -> Any:
    """Return Transformers' model of a directory's config.json, with random weights in which nothing hides."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(directory)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        )
        _randomise(model)
    return model.eval()


def _randomise(model: Any) -> None:
    """Give every parameter and every bias of a router numbers; see the module's docstring."""
    embedding = model.get_input_embeddings()
    width = embedding.weight.shape[-1]
    tied = model.get_output_embeddings().weight is embedding.weight
    experts = FAMILIES[model.config.model_type].experts
    transposed = experts is not None and experts.transposed
    rows_scale = _SMALL / float(getattr(embedding, "embed_scale", 1.0))
    for name, parameter in model.named_parameters():
        if parameter is embedding.weight:
            parameter.copy_(rows_scale * torch.randn_like(parameter))
        elif "norm" in name:  # one, or zero where one is added to it
            parameter.add_(0.3 * torch.randn_like(parameter))
        elif name.endswith(("bias", "sinks")):
            parameter.copy_(torch.randn_like(parameter))
        else:
            summed = parameter.shape[-2 if transposed and parameter.ndim == 3 else -1]
            parameter.copy_(_gain(name) * torch.randn_like(parameter) / summed**0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.3 * torch.randn_like(buffer))
    if tied:  # the embedding's small numbers are those of the output layer, too
        norm = model.model.norm.weight
        around = norm.mean().round()  # 0 or 1
        norm.copy_((norm - around + 1) / (rows_scale * width**0.5) - (1 - around))
    for module in model.modules():
        _shrink_inputs_of_norms(module)


def _gain(name: str) -> float:
    """Standard deviation of what a weight makes of numbers of size one."""
    if "lm_head" in name:
        return 1.0
    if "gate_up" in name or "gate_proj" in name or "up_proj" in name or ".w1" in name or ".w3" in name:
        return 3.0  # gates saturate and reach a clamp
    if "down_proj" in name or ".w2" in name:
        return 0.2
    if "gate" in name or "router" in name:
        return 2.0
    return 1.5


def _shrink_inputs_of_norms(module: nn.Module) -> None:
    """Make small what goes into the norms of an attention and those behind layers."""
    children: dict[str, Any] = dict(module.named_children())
    for name, norm in children.items():
        stem = name.removesuffix("_layernorm").removesuffix("_norm")
        for other, linear in children.items():
            if stem != name and isinstance(linear, nn.Linear) and other.startswith(f"{stem}_proj"):
                linear.weight[: norm.weight.numel()] *= (
                    _SMALL  # the first head's, or the latent without its rotary part
                )
    if "post_feedforward_layernorm" in children:
        children["self_attn"].o_proj.weight.mul_(_SMALL)
        children["mlp"].down_proj.weight.mul_(_SMALL)


def _sequences(vocab_size: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab_size, (length,), generator=generator) for length in LENGTHS]


@torch.no_grad()
def _reference_outputs(model: Any, sequence: Tensor) -> Tensor:
    """Log-probs of the next tokens and entropies, ``[2, tokens - 1]``."""
    log_p = model(sequence[None, :-1]).logits.float().log_softmax(-1)[0]
    return torch.stack([log_p.gather(-1, sequence[1:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)])


def _reference_frequencies(model: nn.Module) -> list[Tensor]:
    """Frequencies of each kind of rotary embedding, in radians per position."""
    return [
        buffer.float() for name, buffer in model.named_buffers() if name.endswith("inv_freq") and "original" not in name
    ]


# ---- Megatron --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _megatron_outputs(chunk: nn.Module, sequences: list[Tensor], vocab_size: int, cap: float | None) -> list[Tensor]:
    """The same of Megatron's model, for a micro-batch of all sequences, packed as in training."""
    from lightning_megatron_rl.models.forward import microbatch_forward
    from lightning_megatron_rl.models.layers.logprobs import logprob_processor

    lengths = [len(sequence) - 1 for sequence in sequences]
    outputs: Tensor = microbatch_forward(
        chunk,
        torch.cat([sequence[:-1] for sequence in sequences])[None],
        torch.cat([torch.arange(length) for length in lengths])[None],
        torch.cat([sequence[1:] for sequence in sequences])[None],
        torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        max(lengths),
        output_processor=logprob_processor(vocab_size=vocab_size, temperature=1.0, with_entropy=True, cap=cap),
    )
    return list(outputs[:, 0].split(lengths, dim=1))


def _frequencies(chunk: nn.Module) -> list[Tensor]:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    found = []
    for module in chunk.modules():
        if isinstance(module, RotaryEmbedding):
            angles = module.get_emb(2)  # of positions 0 and 1
            angles = angles[0] if isinstance(angles, tuple) else angles  # YaRN's come with a factor
            found.append(angles[1].flatten()[: angles.shape[-1] // 2].float())
    return found


def _frequency_difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """How far each kind of rotary embedding is from the one of the other side that is nearest."""
    if not ours or not theirs:
        return 0.0 if len(ours) == len(theirs) else float("inf")
    one_way = [min(_relative(mine, other) for other in theirs) for mine in ours]
    other_way = [min(_relative(other, mine) for mine in ours) for other in theirs]
    return max(one_way + other_way)


def _relative(first: Tensor, second: Tensor) -> float:
    if first.shape != second.shape:
        return float("inf")
    return ((first - second) / second).abs().max().item()
