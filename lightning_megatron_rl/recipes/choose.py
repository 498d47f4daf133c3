"""What a recipe is made of: lengths, batch and samplers by the size of the model, and the fastest layout that fits."""

from dataclasses import replace

from lightning_megatron_rl.models.published import hub_name, short_name
from lightning_megatron_rl.modules.planning import Model, adapter_parameters
from lightning_megatron_rl.parallel.layout import ParallelLayout
from lightning_megatron_rl.planner.budget import choose as take_auto
from lightning_megatron_rl.planner.hardware import Hardware
from lightning_megatron_rl.planner.needs import EngineNeeds
from lightning_megatron_rl.planner.run import Run, Sampling
from lightning_megatron_rl.planner.search import search
from lightning_megatron_rl.planner.timing import Work
from lightning_megatron_rl.recipes.datasets import DAPO, GSM8K, ULTRACHAT, Dataset
from lightning_megatron_rl.recipes.text import SFT_LONGEST, Choices, Method

_SMALL = 2e9  # parameters below which a model learns from short problems
_PROMPT_TOKENS, _SFT_TOKENS = 256, 1024  # that are planned with
_RANK = 16
_TRIED = 8  # layouts that fit, of which the first is taken that leaves `auto` its margin
_CONVERT = (
    "The published weights are quantised, which the sampler would do to what it gets; make them 16 bits once:\n"
    "  lightning-megatron-rl convert {hub} {short}.ckpt\n"
    "  lightning-megatron-rl convert {short}.ckpt {model}"
)
_QUANTISED = {
    "gpt-oss-20b": "openai/gpt-oss-20b",
    "gpt-oss-120b": "openai/gpt-oss-120b",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
}


def choose(
    method: Method, model: Model, kind: Hardware, world: int, data: Dataset | None = None
) -> tuple[Choices, Run]:
    """Return the choices and the run of a recipe.

    Args:
        method: What is trained how.
        model: Its sizes.
        kind: The GPUs.
        world: Their number.
        data: Training rows; None: by the size of the model.

    Raises:
        ValueError: No layout fits, or the data set is not for the method.
    """
    small = model.size.parameters < _SMALL
    if data is None:
        data = ULTRACHAT if method == "sft" and not small else GSM8K if small or method == "sft" else DAPO
    if not (data.sequences if method == "sft" else data.prompts):
        raise ValueError(f"{data.path} is not for {method}: it has no {'responses' if method == 'sft' else 'answers'}")
    short = short_name(model.name) or model.name.rstrip("/").rpartition("/")[2]
    name, note = model.name, ""
    if short in _QUANTISED:
        name = f"{short}-16bit"
        note = _CONVERT.format(hub=hub_name(short), short=short, model=name)
    response = 1024 if data is GSM8K else 4096
    choices = Choices(
        method,
        name,
        short,
        data,
        response_tokens=response,
        batch=64,
        note=note,
        thinking_off=model.divided.model_type in ("qwen3", "qwen3_moe") and data is GSM8K,
    )
    return choices, plan_choices(choices, replace(model, name=name), kind, world)


def plan_choices(choices: Choices, model: Model, kind: Hardware, world: int) -> Run:
    """Return the fastest run of these choices that fits, with what `auto` takes in its layout.

    Raises:
        ValueError: None does.
    """
    lora = choices.method == "grpo_lora"
    run = Run(
        model=model.name,
        size=model.size,
        divided=model.divided,
        layout=ParallelLayout(),
        kind=kind,
        world=world,
        work=_work(choices),
        microbatch_tokens=8192,
        fused_activation=model.gated_by_silu,
        adapter_parameters=adapter_parameters(model.size, _RANK) if lora else 0,
    )
    if choices.method != "sft":
        utilization = 0.85 if model.size.parameters >= _SMALL else 0.4
        if 2 * model.size.parameters / kind.per_node > 0.8 * kind.total:
            utilization = 0.95  # little is left beside the weights
        needs = EngineNeeds(gpu_memory_utilization=utilization, vllm=True)
        tokens = _PROMPT_TOKENS * 2 + choices.response_tokens
        run = replace(run, sampling=Sampling(needs, sequences=256, tokens=tokens, sleeps=False))
    longest = SFT_LONGEST if run.sampling is None else run.sampling.tokens
    found = [take_auto(one.run, tokens=True, recompute=True, least=longest) for one in search(run, count=_TRIED)]
    fitting = next((one for one in found if one.fits), None)
    if fitting is None:
        found[0].require()
    return fitting or found[0]


def _work(choices: Choices) -> Work:
    if choices.method == "sft":
        return Work(sequences=choices.batch, tokens=_SFT_TOKENS, longest=SFT_LONGEST)
    generations = 8
    return Work(
        sequences=choices.batch * generations,
        tokens=_PROMPT_TOKENS + choices.response_tokens,
        prompts=choices.batch,
        prompt_tokens=_PROMPT_TOKENS,
        response_tokens=choices.response_tokens,
        longest=_PROMPT_TOKENS * 2 + choices.response_tokens,
    )
