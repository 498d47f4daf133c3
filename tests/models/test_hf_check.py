"""A checkpoint is loaded as Transformers loads it, or refused by the name of the tensor."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from lightning_megatron_rl.models.hf.check import EMBEDDING, OUTPUT_LAYER
from lightning_megatron_rl.models.hf.files import INDEX_FILE
from lightning_megatron_rl.models.hf.model import HFModel
from lightning_megatron_rl.models.value_model import ValueModel
from tests.convert.jobs import convert
from tests.distributed import WorkerPool
from tests.models.conftest import hf_logprobs, worst_difference
from tests.models.test_families import VARIANTS
from tests.models.test_quantised import save_mxfp4, save_quantised
from tests.models.workers import build_errors, loaded_and_exported, logprobs_under_layout
from tests.selection import by_default
from tests.tiny_models import FILE, save_tiny_model

FAMILIES = [variants[0] for variants in VARIANTS.values()]
LAYER = "model.layers.1."
UP = f"{LAYER}mlp.up_proj.weight"


def damaged(source: Path, directory: Path, change: Callable[[dict[str, Tensor]], Any], **config: Any) -> str:
    """A copy of a checkpoint whose tensors, and fields of whose config, were changed."""
    shutil.copytree(source, directory)
    tensors = load_file(source / FILE)
    change(tensors)
    save_file(
        {name: tensor.clone().contiguous() for name, tensor in tensors.items()}, directory / FILE, {"format": "pt"}
    )
    if config:
        content = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(content | config))
    return str(directory)


def sharded(source: Path, directory: Path, parts: int = 3) -> Path:
    """A copy of a checkpoint in several files."""
    shutil.copytree(source, directory, ignore=shutil.ignore_patterns(FILE))
    tensors = sorted(load_file(source / FILE).items())
    names = {}
    for part in range(parts):
        file = f"model-{part + 1:05d}-of-{parts:05d}.safetensors"
        save_file(dict(tensors[part::parts]), directory / file, {"format": "pt"})
        names |= {name: file for name, _ in tensors[part::parts]}
    (directory / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return directory


def add_to(directory: Path, file: str, **tensors: Tensor) -> None:
    """Add tensors to a file of a checkpoint."""
    save_file(load_file(directory / file) | tensors, directory / file, {"format": "pt"})


@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_shapes_are_checked_for_every_family(family: str, checkpoint: Callable[[str], Path], tmp_path: Path):
    """The last tensor of each kind is missing, cut or of another type: none is left that is not looked at."""
    HFModel(str(checkpoint(family)))
    tensors = load_file(checkpoint(family) / FILE)
    kinds = {re.sub(r"\.\d+\.", ".#.", name): name for name in sorted(tensors)}
    for number, name in enumerate(kinds.values()):
        tensor = tensors[name]
        kind = ("missing", "shape", "type", "empty")[number % 4]

        def change(held: dict[str, Tensor], name: str = name, tensor: Tensor = tensor, kind: str = kind) -> None:
            del held[name]
            if kind != "missing":
                held[name] = {"shape": tensor[..., :-1], "type": tensor.to(torch.int8), "empty": tensor[:0]}[kind]

        with pytest.raises(ValueError) as told:
            HFModel(damaged(checkpoint(family), tmp_path / str(number), change))
        shutil.rmtree(tmp_path / str(number))
        expected = {
            "missing": f"has no weights for {name}.",
            "shape": f"{FILE}: {name} has shape {tuple(tensor[..., :-1].shape)} instead of {tuple(tensor.shape)}:",
            "type": f"{FILE}: {name} has type I8 instead of F64 or F32 or F16 or BF16.",
            "empty": f"{FILE}: {name} has shape {tuple(tensor[:0].shape)} instead of {tuple(tensor.shape)}:",
        }[kind]
        assert expected in str(told.value)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda held: held.update(extra=torch.ones(2)),
            "has 1 tensors that the model of its config.json has not: extra",
        ),
        (lambda held: held.update({UP: held[UP].T}), f"{UP} has shape (64, 128) instead of (128, 64)"),
        (
            lambda held: held.update({f"{LAYER}mlp.up.weight": held.pop(UP)}),
            f"has no weights for {UP}, and has tensors",
        ),
        (
            lambda held: held.update({f"{UP[:-6]}bias": torch.ones(128)}),
            f"has not: {UP[:-6]}bias (F32 (128,) in {FILE})",
        ),
        (lambda held: held.update({UP: held[UP].to(torch.float8_e4m3fn)}), f"{UP} has type F8_E4M3"),
        (lambda held: held.update({UP: held[UP].bool()}), f"{UP} has type BOOL"),
        (
            lambda held: held.update({EMBEDDING: held[EMBEDDING][:100]}),
            f"{EMBEDDING} has shape (100, 64) instead of (128",
        ),
        (
            lambda held: held.update({"model.layers.4.mlp.up_proj.weight": held[UP]}),
            "model.layers.4.mlp.up_proj.weight",
        ),
        (lambda held: [held.pop(name) for name in [*held] if ".2." in name], "has no weights for model.layers.2."),
        (lambda held: held.update({f"{UP}_scale_inv": torch.ones(1, 1)}), f"{UP}_scale_inv (F32 (1, 1)"),
    ],
    ids=["extra", "transposed", "renamed", "bias", "fp8", "bool", "vocabulary", "layer", "no layer", "scale"],
)
@pytest.mark.parametrize("kind", [HFModel, ValueModel])
def test_other_damage(change: Any, expected: str, kind: Any, checkpoint: Callable[[str], Path], tmp_path: Path):
    with pytest.raises(ValueError, match=r"^checkpoint ") as told:
        kind(damaged(checkpoint("qwen3"), tmp_path / "model", change))
    assert expected in str(told.value)


def test_what_transformers_leaves_out_or_converts_is_loaded(checkpoint: Callable[[str], Path], tmp_path: Path):
    """Frequencies that old versions saved, layers of multi-token prediction, other floating-point types."""
    frequencies = {f"{LAYER}self_attn.rotary_emb.inv_freq": torch.ones(16)}
    HFModel(damaged(checkpoint("llama"), tmp_path / "a", lambda held: held.update(frequencies)))
    extra = {"model.layers.4.eh_proj.weight": torch.ones(2, 2)}
    HFModel(damaged(checkpoint("deepseek_v3"), tmp_path / "c", lambda held: held.update(extra)))
    extra = {"model.layers.5.eh_proj.weight": torch.ones(2, 2)}
    with pytest.raises(ValueError, match=r"has not: model\.layers\.5\.eh_proj"):
        HFModel(damaged(checkpoint("deepseek_v3"), tmp_path / "d", lambda held: held.update(extra)))
    HFModel(damaged(checkpoint("llama"), tmp_path / "e", lambda held: held.update({UP: held[UP].double()})))


@pytest.mark.parametrize("family", ["qwen2_tied", "gemma3"])
def test_an_output_layer_that_is_not_the_embedding(family: str, checkpoint: Callable[[str], Path], tmp_path: Path):
    """Transformers 5 uses both, whatever the config says; a copy of the embedding is one."""
    source = checkpoint(family)
    for directory in (source, sharded(source, tmp_path / "sharded")):
        HFModel(
            damaged(
                source, tmp_path / f"{directory.name} same", lambda held: held.update({OUTPUT_LAYER: held[EMBEDDING]})
            )
        )

    def change(held: dict[str, Tensor]) -> None:
        held[OUTPUT_LAYER] = held[EMBEDDING].clone()
        held[OUTPUT_LAYER][77, 3] += 1e-3

    directory = damaged(source, tmp_path / "other", change)
    ids = torch.arange(1, 20)[None]
    models = [AutoModelForCausalLM.from_pretrained(path).eval() for path in (source, directory)]
    with torch.no_grad():
        assert not torch.equal(*(model(ids).logits for model in models)), "Transformers ties them now: do so here"
    message = f"tie_word_embeddings=true, but {OUTPUT_LAYER} is not {EMBEDDING}: they differ from row 77 of 128 on"
    with pytest.raises(ValueError, match=message):
        HFModel(directory)
    with pytest.raises(ValueError, match=message):
        HFModel(str(sharded(Path(directory), tmp_path / "other sharded")))
    ValueModel(directory)  # has a head in the output layer's place


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_tied_families_that_are_not_tied_here(family: str, checkpoint: Callable[[str], Path], tmp_path: Path):
    directory = damaged(
        checkpoint(family), tmp_path / "tied", lambda held: held.pop(OUTPUT_LAYER), tie_word_embeddings=True
    )
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.lm_head.weight is model.model.embed_tokens.weight, "Transformers ties them no more: nothing to refuse"
    with pytest.raises(ValueError, match=f"{family} with tie_word_embeddings=true is not supported"):
        HFModel(directory)


def test_files_and_index_must_agree(checkpoint: Callable[[str], Path], tmp_path: Path):
    whole = sharded(checkpoint("qwen3"), tmp_path / "whole")
    HFModel(str(whole))
    files = sorted(file.name for file in whole.glob("*.safetensors"))
    index = json.loads((whole / INDEX_FILE).read_text())["weight_map"]
    name = next(name for name, file in index.items() if file == files[0])

    def refused(change: Callable[[Path], Any], expected: str) -> None:
        model = Path(shutil.copytree(whole, tmp_path / "model"))
        change(model)
        with pytest.raises(ValueError) as told:
            HFModel(str(model))
        assert expected in str(told.value)
        shutil.rmtree(model)

    def write(model: Path, **places: Any) -> None:
        places = {key: file for key, file in (index | places).items() if file != "nowhere"}
        (model / INDEX_FILE).write_text(json.dumps({"weight_map": places}))

    refused(lambda m: write(m, **{name: files[1]}), f"says that {name} is in {files[1]}, which has no such tensor")
    refused(lambda m: write(m, ghost=files[0]), f"says that ghost is in {files[0]}, which has no such tensor")
    refused(lambda m: write(m, **{name: "nowhere"}), f"has {name} in {files[0]}, but not in {INDEX_FILE}")
    refused(lambda m: write(m, **{name: None}), f"{name} should have the name of a file in this directory, not None")
    refused(lambda m: write(m, **{name: f"inner/{files[0]}"}), "should have the name of a file in this directory")
    refused(lambda m: write(m, **{name: f"../{files[0]}"}), "names a file outside its directory")
    refused(lambda m: write(m, **{name: "no.safetensors"}), "lacks no.safetensors of the files that")
    refused(
        lambda m: add_to(m, files[1], **{name: torch.ones(2)}),
        f"has {name} in several files ({files[0]} and {files[1]})",
    )
    refused(lambda m: save_file({"a": torch.ones(1)}, m / FILE), f"has both {FILE} and an index of other files")
    refused(lambda m: (m / INDEX_FILE).unlink(), f"has neither {FILE} nor {INDEX_FILE}, only {', '.join(files)}")


def test_other_weights_beside_the_model_are_not_its_own(
    checkpoint: Callable[[str], Path], sequences: list[list[int]], tmp_path: Path, worker_pool: WorkerPool
):
    """Mistral's releases have their weights a second time under other names; adapters may lie there, too."""
    model = Path(shutil.copytree(checkpoint("mistral"), tmp_path / "model"))
    others = {"tok_embeddings.weight": torch.ones(2, 2), EMBEDDING: torch.full((128, 64), torch.nan)}
    save_file(others, model / "consolidated.safetensors")
    (packed, _), *_ = worker_pool.run(logprobs_under_layout, str(model), sequences, 1, 1, False, 1.0, world_size=1)
    assert worst_difference(packed, hf_logprobs(model, sequences)) < 1e-5


@pytest.mark.parametrize(
    ("save", "change", "expected"),
    [
        (save_quantised, {f"{UP}_scale_inv": torch.ones(3, 2)}, f"{UP}_scale_inv has shape (3, 2) instead of (8, 2)"),
        (save_quantised, {f"{UP}_scale_inv": None}, f"weights in fp8 without their scales {UP}_scale_inv"),
        (save_quantised, {UP: torch.ones(128, 64)}, f"has not: {UP}_scale_inv"),
        (save_quantised, {EMBEDDING: torch.ones(128, 64).to(torch.float8_e4m3fn)}, "without their scales model.embed"),
        (
            save_mxfp4,
            {"down_proj_scales": torch.ones(4, 64, 3, dtype=torch.uint8)},
            "scales has shape (4, 64, 3) instead",
        ),
        (save_mxfp4, {"down_proj_blocks": torch.ones(4, 64, 2, 16)}, "down_proj_blocks has type F32 instead of U8"),
        (save_mxfp4, {"down_proj_blocks": None}, "has no weights for model.layers.1.mlp.experts.down_proj_blocks"),
    ],
)
def test_quantised_tensors(
    save: Any, change: dict[str, Any], expected: str, checkpoint: Callable[[str], Path], tmp_path: Path
):
    save(checkpoint("qwen3" if save is save_quantised else "gpt_oss"), tmp_path / "model")
    HFModel(str(tmp_path / "model"))

    def spoil(held: dict[str, Tensor]) -> None:
        for name, tensor in change.items():
            key = name if "." in name else f"{LAYER}mlp.experts.{name}"
            held.pop(key)
            if tensor is not None:
                held[key] = tensor

    if EMBEDDING in change:
        spoil = lambda held: held.update(change)  # noqa: E731
    with pytest.raises(ValueError) as told:
        HFModel(damaged(tmp_path / "model", tmp_path / "damaged", spoil))
    assert expected in str(told.value)


def spoilt(tensors: dict[str, Tensor], name: str, *numbers: float) -> None:
    """Put numbers into the middle of a tensor."""
    tensors[name].view(-1)[tensors[name].numel() // 2 :][: len(numbers)] = torch.tensor(numbers)


@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"pp": 2}], ids=str)
def test_weights_that_are_no_numbers_are_named_on_all_ranks(
    layout: dict[str, int], checkpoint: Callable[[str], Path], tmp_path: Path, worker_pool: WorkerPool
):
    """In the first and in the last layer, in a fused projection, and a number that 16 bits do not hold."""
    last, first = "model.layers.3.self_attn.k_proj.weight", "model.layers.0.input_layernorm.weight"
    nan, inf = torch.nan, torch.inf
    cases = {
        "nan": damaged(checkpoint("qwen3"), tmp_path / "nan", lambda held: spoilt(held, last, nan, inf)),
        "inf": damaged(checkpoint("qwen3"), tmp_path / "inf", lambda held: spoilt(held, first, -inf)),
        "head": damaged(checkpoint("qwen2_tied"), tmp_path / "head", lambda held: spoilt(held, EMBEDDING, nan)),
        "large": damaged(checkpoint("qwen3"), tmp_path / "large", lambda held: spoilt(held, UP, 1e5)),
        "expert": damaged(
            checkpoint("qwen3_moe"),
            tmp_path / "e",
            lambda held: spoilt(held, f"{LAYER}mlp.experts.3.down_proj.weight", nan),
        ),
    }
    dtypes = {"large": torch.float16}
    world_size = 2 if layout else 1
    answers = worker_pool.run(build_errors, cases, layout, sp="tp" in layout, dtypes=dtypes, world_size=world_size)
    for errors in answers:
        assert f"{last} has 1 NaN and 1 infinite of 4096 numbers" in errors["nan"]
        assert f"{first} has 0 NaN and 1 infinite of 64 numbers" in errors["inf"]
        assert f"{EMBEDDING} has 1 NaN" in errors["head"]
        assert f"{UP} reaches 100000, and torch.float16 ends at 65504" in errors["large"]
        assert "mlp.experts.3.down_proj.weight has 1 NaN" in errors["expert"]
        assert all("loaded weights are not finite" in error for error in errors.values())


def test_conversion_refuses_the_same(checkpoint: Callable[[str], Path], tmp_path: Path, worker_pool: WorkerPool):
    directory = damaged(checkpoint("qwen3"), tmp_path / "nan", lambda held: spoilt(held, UP, torch.nan))
    code, shown = convert(worker_pool, Path(directory), tmp_path / "c.ckpt")
    assert code == 1
    assert f"{UP} has 1 NaN and 0 infinite of 8192 numbers" in shown
    assert not (tmp_path / "c.ckpt").exists()


@pytest.mark.parametrize("sizes", [(64, 32), (64, 64)], ids=["square gate", "square down"])
@pytest.mark.parametrize("stored", by_default(["mxfp4"], ["plain", "mxfp4"]))
def test_gpt_oss_experts_of_any_shape_are_not_transposed(
    sizes: tuple[int, int], stored: str, sequences: list[list[int]], tmp_path: Path, worker_pool: WorkerPool
):
    """Fails with Megatron-Bridge's own mapping where the gate is square: it tells the layout by the shape."""
    hidden, width = sizes
    directory = save_tiny_model(tmp_path / "model", "gpt_oss", hidden_size=hidden, intermediate_size=width)
    reference = directory
    if stored == "mxfp4":
        meant = save_mxfp4(directory, tmp_path / "mxfp4")
        save_file(meant, directory / FILE, {"format": "pt"})  # as Transformers' own arithmetic unpacks them
        directory = tmp_path / "mxfp4"
    (packed, exported), *_ = worker_pool.run(loaded_and_exported, str(directory), sequences, world_size=1)
    assert worst_difference(packed, hf_logprobs(reference, sequences)) < 1e-4
    weights = load_file(reference / FILE)
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[name], weights[name].float()) for name in weights)


def test_a_config_of_which_no_model_can_be_built_is_named(qwen3_dir, tmp_path):
    directory = Path(shutil.copytree(qwen3_dir, tmp_path / "model"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "num_attention_heads": 0}))
    with pytest.raises(ValueError, match=r"config\.json.*: ZeroDivisionError"):
        HFModel(str(directory))
