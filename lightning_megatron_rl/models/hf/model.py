"""A Hugging Face checkpoint and its Megatron twin: building, loading, exporting and saving through Megatron-Bridge."""

import dataclasses
import difflib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_megatron_rl.compat.bridge import import_auto_bridge, model_bridge, set_weights
from lightning_megatron_rl.compat.expert_bias import sum_expert_biases_once
from lightning_megatron_rl.compat.expert_order import leave_sorted_tokens
from lightning_megatron_rl.compat.recompute import install_recompute
from lightning_megatron_rl.models.families.check import check_family, divided_sizes
from lightning_megatron_rl.models.families.family import Family
from lightning_megatron_rl.models.families.refused import refuse_architectures
from lightning_megatron_rl.models.families.registry import FAMILIES, bridges
from lightning_megatron_rl.models.families.rope import set_rope
from lightning_megatron_rl.models.hf.check import check_weights
from lightning_megatron_rl.models.hf.files import (
    anywhere,
    check_tokenizer_files,
    fingerprint,
    local_checkpoint,
    raise_everywhere,
    settings_files,
)
from lightning_megatron_rl.models.hf.quantised import dequantised_source, quantisation
from lightning_megatron_rl.models.hf.save import SavesFiles
from lightning_megatron_rl.models.hf.source import source_class
from lightning_megatron_rl.models.hf.tensors import HFWeights, describe_bad
from lightning_megatron_rl.models.layers.backend import (
    LayerBackend,
    expert_layers,
    resolve_layer_backend,
    torch_block_spec,
)
from lightning_megatron_rl.models.layers.fusions import fused_kernels, fuses_gradients, tune_for_experts
from lightning_megatron_rl.models.layers.lora import LoRASettings, add_adapters, check_targets
from lightning_megatron_rl.models.layers.padding import leave_out_padding, padding_row
from lightning_megatron_rl.models.overrides import (
    DISPATCHER,
    LayerParts,
    check_dispatcher,
    check_overrides,
    check_recompute,
    default_dispatcher,
)
from lightning_megatron_rl.models.verification.verify import VerifyModel, check_mode, computed_overrides, verify_model
from lightning_megatron_rl.parallel.layout import ParallelLayout
from lightning_megatron_rl.planner.divisibility import PipelineSplit, check_layout
from lightning_megatron_rl.utilities.console import prints_to_log
from lightning_megatron_rl.utilities.finite import nonfinite_names, not_finite
from lightning_megatron_rl.utilities.remote_code import remedy, trusts_remote_code
from lightning_megatron_rl.utilities.text_files import read_json
from lightning_megatron_rl.weights.export_views import ExportViews, plan_views
from lightning_megatron_rl.weights.sharded_plan import plan_sharded_views
from lightning_megatron_rl.weights.sharded_views import BUCKET_BYTES, ShardedViews

SHARED_WITH_OUTPUT = ("embedding.word_embeddings.weight", "output_layer.weight")  # padded to the tensor-parallel size

SIZES = (  # settings of a Hugging Face config that decide on the shapes of weights
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_intermediate_size",
    "tie_word_embeddings",
)
KEPT_IN_FP32 = ("e_score_correction_bias", ".mlp.expert_bias")  # the biases of routers; HunYuan V3's is the second


class HFModel(SavesFiles):
    """A Hugging Face checkpoint (hub name or directory) and its Megatron twin.

    The name is downloaded once per node. Raises `ValueError` if there is no such model, a file is missing, the family
    is not supported, or the weights are not those of the config (`hf_check.check_weights`). `verify` says how
    Megatron's computation is checked against Transformers, see `check_computation`; None is for that check itself.

    Example:
        ``model = HFModel("Qwen/Qwen3-0.6B")``; when Megatron's parallel state is up
        ``chunks = model.build_chunks(…)``; after training ``model.save_pretrained(chunks, "export")``.
    """

    def __init__(self, name_or_path: str, *, verify: VerifyModel | None = "auto") -> None:
        if verify is not None:
            check_mode(verify)
        self.name_or_path = name_or_path
        self.verify = verify
        self._checked: dict[str, Any] | None = None  # overrides with which its computation is known to be right
        self.path: Path = self._find(name_or_path)
        self.config: Any = self._read_config()
        check_family(self.config)
        self.padding_row = padding_row(self.config)
        self.quantisation = quantisation(self.config)
        self._check_weights()

    def _find(self, name_or_path: str) -> Path:
        """The checkpoint's directory."""
        return local_checkpoint(name_or_path)

    def _check_weights(self) -> None:
        """Refuse weights that do not belong to the config; of the files only the headers are read."""
        check_weights(self.path, self.config)

    def settings_files(self, directory: str) -> dict[str, bytes]:
        """Return the files of the checkpoint without its weights by their paths; see `hf_files.settings_files`."""
        files = settings_files(self.path, self.name_or_path)
        return {f"{directory}/{name}": content for name, content in files.items()}

    def _read_config(self) -> Any:
        """The config of the language model that the checkpoint holds."""
        from transformers import AutoConfig

        raw = read_json(self.path / "config.json")
        refuse_architectures(raw.get("architectures") or [])  # Transformers may not know them
        try:
            return AutoConfig.from_pretrained(self.path, trust_remote_code=trusts_remote_code())
        except Exception as error:  # of the config classes' own checks, and of what they take for granted
            raise ValueError(
                f"Transformers cannot read {self.path / 'config.json'}: {type(error).__name__}: {error}{remedy(error)}"
            ) from error

    def check_checkpoint(self, path: Path) -> None:
        """Refuse a distributed checkpoint whose model has other sizes than this one, where it says which it has.

        Raises:
            ValueError: With the sizes that differ.
        """
        config = path / "hf" / "config.json"
        if not config.is_file():
            return
        saved, own = read_json(config), self.config.to_dict()
        differing = [
            f"{name} {saved[name]} in the checkpoint, {own[name]} in {self.name_or_path!r}"
            for name in SIZES
            if name in saved and name in own and saved[name] != own[name]
        ]
        if differing:
            raise ValueError(
                f"checkpoint {path} is of another model: {'; '.join(differing)}. Use it with the model that it was"
                " trained from"
            )

    @property
    def family(self) -> Family:
        """What is special to models of this kind."""
        return FAMILIES[self.config.model_type]

    @property
    def logit_cap(self) -> float | None:
        """What bounds the logits softly, for `logprob_processor`; None for most families."""
        return self.config.final_logit_softcapping if self.family.soft_caps else None

    @property
    def export_config(self) -> Any:
        """The config that goes with exported weights."""
        return self.config

    @cached_property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer."""
        from transformers import AutoTokenizer

        check_tokenizer_files(self.path)
        return AutoTokenizer.from_pretrained(self.path, trust_remote_code=trusts_remote_code())

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the checkpoint's weights (fp32 if its config does not say)."""
        return self.config.dtype or torch.float32

    @cached_property
    def fingerprint(self) -> str:
        """A hash that tells this checkpoint from others of the same architecture, e.g. an earlier training step."""
        return fingerprint(self.path)

    def check_layout(self, layout: ParallelLayout, overrides: Mapping[str, Any] | None = None) -> None:
        """Raise `ValueError` if the model cannot be split like this; see `planner.divisibility`.

        Args:
            layout: Of a run.
            overrides: Fields of Megatron's `TransformerConfig`, some of which divide layers among pipeline stages.
        """
        check_layout(divided_sizes(self.config), layout, PipelineSplit.from_overrides(overrides or {}))

    def check_computation(self, config_overrides: dict[str, Any] | None = None) -> None:
        """Refuse a model that Megatron may compute differently from Transformers; a collective.

        Either a shipped proof covers its settings, or a miniature of it is run through both, once; see
        `verification.verify_model`. `build_chunks` does this before it loads weights.

        Raises:
            ValueError: With the settings that no proof covers.
        """
        overrides = computed_overrides(config_overrides or {})
        if self.verify is None or overrides == self._checked:
            return
        try:
            provider = self._provider()
        except Exception as error:
            raise ValueError(
                f"Megatron-Bridge cannot read {self.path / 'config.json'}: {type(error).__name__}: {error}"
            ) from error
        raw = json.loads((self.path / "config.json").read_bytes())
        verify_model(self.name_or_path, raw, self.config, provider, overrides, self.verify)
        self._checked = overrides

    def _provider(self) -> Any:
        """Megatron-Bridge's provider of the model, with the positions that config.json has; it loads no weights."""
        provider = self._bridge.to_megatron_provider(load_weights=False)
        if self.family.rope.keys:
            set_rope(provider, self.config.rope_parameters or {})
        return provider

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the converter, which is made again where it is needed: it has classes of its own."""
        return {name: value for name, value in vars(self).items() if name != "_bridge"}

    @cached_property
    def _bridge(self) -> Any:
        """Megatron-Bridge's converter for this checkpoint, told how layers that it does not know are split."""
        auto_bridge = import_auto_bridge(bridges())
        from megatron.bridge.models.conversion.param_mapping import AutoMapping

        AutoMapping.register_module_type("TorchLinear", "replicated")
        AutoMapping.register_module_type("TorchRowParallelLinearNorm", "row")
        AutoMapping.register_module_type("TorchAllHeadsNorm", "replicated")
        AutoMapping.register_module_type("TorchExpertLinear", "row")
        AutoMapping.register_module_type("TorchDotProductAttention", "column")  # the sinks of its heads
        bridge = auto_bridge.from_hf_pretrained(
            str(self.path), trust_remote_code=trusts_remote_code(), architectures=self.config.architectures
        )
        fp8 = self.quantisation == "fp8"
        source = dequantised_source(self.path, self.config) if fp8 else source_class()(self.path)
        set_weights(bridge, source)
        return bridge

    @property
    def has_latent_attention(self) -> bool:
        """Whether keys and values come from a latent vector, as in DeepSeek-V3."""
        return getattr(self.config, "kv_lora_rank", None) is not None

    def build_chunks(
        self,
        *,
        params_dtype: torch.dtype,
        layer_backend: LayerBackend,
        device: torch.device,
        sequence_parallel: bool,
        load_weights: bool = True,
        config_overrides: dict[str, Any] | None = None,
        lora: LoRASettings | None = None,
    ) -> list[Any]:
        """Build this rank's part of the model, one Megatron `GPTModel` per virtual pipeline stage, not wrapped in DDP.

        Megatron's parallel state must be up; the layout is read from it. `config_overrides` are fields of Megatron's
        `TransformerConfig`. Losses are summed over tokens (`calculate_per_token_loss`), micro-batches may differ in
        length, dropout is off. With `lora` its adapters are trainable and nothing else. On the meta device the model
        has shapes and no numbers. Raises `ValueError` for a layout the model cannot be split into, for unknown
        overrides and for overrides of what the strategy decides, for adapters that fit no layer, and if a weight is NaN
        or infinite in the checkpoint or in `params_dtype`.
        """
        overrides = config_overrides or {}
        settings = _settings(params_dtype, sequence_parallel)
        backend = resolve_layer_backend(
            layer_backend,
            device,
            params_dtype=params_dtype,
            context_parallel_size=settings["context_parallel_size"],
            latent_attention=self.has_latent_attention,
            family=self.family,
        )
        self.check_computation(overrides)
        provider = self._provider()
        _check_overrides(overrides, settings, {field.name for field in dataclasses.fields(provider)})
        tune_for_experts(backend, provider.num_moe_experts)
        settings |= fused_kernels(backend, provider, overrides, fused_rope=self.family.fused_rope)
        overrides = check_overrides(overrides, device=device, transformer_engine=backend == "transformer_engine")
        asked = overrides.pop("gradient_accumulation_fusion", None)
        asked_dispatcher = overrides.pop(DISPATCHER, None)
        _check_model(overrides, settings, provider)
        tensor = settings["tensor_model_parallel_size"]
        sizes = {field.name: settings[field.name] for field in dataclasses.fields(ParallelLayout)}
        layout = ParallelLayout(**{**sizes, "sequence_parallel": sequence_parallel and tensor > 1})
        fields = {**vars(provider), **settings, **overrides}
        dispatcher = default_dispatcher(fields, layout) if asked_dispatcher is None else asked_dispatcher
        check_dispatcher(dispatcher, fields, overrides)
        self.check_layout(layout, overrides)
        if backend == "torch":
            provider.transformer_layer_spec = partial(
                torch_block_spec,
                norms=self.family.norms,
                norm_all_heads=self.family.norm_all_heads,
                cap=provider.attn_logit_softcapping if self.family.soft_caps else None,
            )
            settings["attention_backend"] = type(
                provider.attention_backend
            ).auto  # others are told to the whole process
            settings |= self.family.torch_settings(provider)
        if device.type != "cuda":
            settings |= _WITHOUT_CUDA
        if load_weights or device.type == "meta":
            settings["perform_initialization"] = False
        if dispatcher == "allgather":
            settings["moe_shared_expert_overlap"] = False  # some families' default; it belongs to the all-to-all
        for name, value in {**_DEFAULTS, **settings, **overrides}.items():
            setattr(provider, name, value)
        provider.finalize()
        install_recompute(transformer_engine=backend == "transformer_engine")
        steps: list[Callable[[list[Any]], Any]] = [partial(check_targets, settings=lora)] if lora is not None else []
        if load_weights:
            steps += [_poison, self._bridge.load_hf_weights, self._check_loaded]
        provider.register_pre_wrap_hook(_Steps(steps))
        with prints_to_log():
            chunks = provider.provide_distributed_model(
                wrap_with_ddp=False,
                mixed_precision_wrapper=None,
                use_cpu_initialization=device.type != "cuda",
                init_model_with_meta_device=device.type == "meta",
            )
        sum_expert_biases_once(chunks)
        leave_sorted_tokens(chunks)
        if dispatcher == "allgather":
            from lightning_megatron_rl.compat.expert_gather import gather_tokens  # classes of Megatron's

            gather_tokens(chunks, ends_layer=self.family.norms == "before")
        leave_out_padding(chunks, self.padding_row)
        if lora is not None:
            add_adapters(chunks, lora)
        for chunk in chunks:  # for `wrap_for_training`: the layers need the buffers that Megatron's DDP makes
            chunk.config.gradient_accumulation_fusion = fuses_gradients(backend, asked, has_adapters=lora is not None)
        return chunks

    def conversion_tasks(self, chunks: list[Any]) -> list[Any]:
        """Return Megatron-Bridge's plan for each weight that it converts."""
        return list(self._bridge.get_conversion_tasks(chunks))

    def _is_loaded(self, name: str) -> bool:
        """Whether a tensor of a chunk comes from the checkpoint."""
        return True

    def _check_loaded(self, chunks: list[Any]) -> None:
        """Refuse weights that are NaN or infinite; a collective, and every rank raises the same error.

        A weight that loading left out is NaN, see `_poison`: Megatron-Bridge only warns.
        """
        tensors = [pair for chunk in chunks for pair in _loaded_tensors(chunk) if self._is_loaded(pair[0])]
        bad = nonfinite_names((str(index), tensor) for index, (_, tensor) in enumerate(tensors))
        if not anywhere(bool(bad)):
            return
        tasks = {id(task.param_weight): task for task in self.conversion_tasks(chunks) if task is not None}
        found = [
            describe_bad(tasks[id(tensor)], self._bridge.hf_pretrained.state) if id(tensor) in tasks else name
            for name, tensor in (tensors[int(index)] for index in bad)
        ]
        raise_everywhere(f"checkpoint {self.path}: {not_finite(found)}" if found else None)

    def export_weights(
        self, chunks: list[Any], dtype: torch.dtype | None = None, tasks: Sequence[Any] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight whole, under its Hugging Face name, in `dtype` (default: the checkpoint's) on its device.

        The weights are the chunks' own, or those that come with `tasks`.

        A collective: all ranks of the world must iterate to the end, and all get all tensors. Padding of the
        vocabulary is cut off; a tied output layer is yielded only if the checkpoint has one. Biases that balance
        experts stay in fp32, as in the checkpoint: lower precision would send tokens to other experts.
        """
        from lightning_megatron_rl.models.adapter_weights import MergedTasks

        with torch.no_grad():
            tasks = self.conversion_tasks(chunks) if tasks is None else tasks
            for name, tensor in self._convert(chunks, MergedTasks(tasks, chunks)):
                yield name, tensor if name.endswith(KEPT_IN_FP32) else tensor.to(dtype or self.dtype)

    def open_weights(self, chunks: list[Any]) -> HFWeights:
        """Return the checkpoint's weights as the parameters of `chunks`, which are made one at a time."""
        return HFWeights(self._bridge, chunks)

    def plan_export_views(self, chunks: list[Any]) -> ExportViews | None:
        """Plan to export the chunks' own memory, for a rank that has the whole model; None if that cannot be."""
        tasks = self.conversion_tasks(chunks)
        return plan_views(tasks, partial(self._convert, chunks), self._convert(chunks, tasks))

    def plan_sharded_views(self, chunks: list[Any], bucket_bytes: int = BUCKET_BYTES) -> ShardedViews | None:
        """Plan to export a model that is split over ranks; None if that cannot be; a collective."""
        from megatron.core import parallel_state

        groups = (
            parallel_state.get_model_parallel_group(),
            parallel_state.get_expert_tensor_model_pipeline_parallel_group(),
        )
        tasks = self.conversion_tasks(chunks)
        return plan_sharded_views(tasks, partial(self._convert, chunks), groups, bucket_bytes)

    def _convert(self, chunks: list[Any], tasks: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield what Megatron-Bridge makes of the tasks, without padding of the vocabulary."""
        for name, tensor in self._bridge.export_hf_weights(
            chunks, show_progress=False, conversion_tasks=tasks, merge_adapter_weights=False
        ):
            yield name, tensor[: self.config.vocab_size] if name in self._padded_names else tensor

    @cached_property
    def _padded_names(self) -> set[str]:
        """Hugging Face names of the weights that have one row per token of the vocabulary."""
        mappings = model_bridge(self._bridge).mapping_registry()
        found = [mappings.megatron_to_hf_lookup(name) for name in SHARED_WITH_OUTPUT]
        return {mapping.hf_param for mapping in found if mapping is not None}  # Gemma has no output layer of its own


# Megatron's own defaults that are wrong here; a user may ask for dropout.
_DEFAULTS = {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "gradient_accumulation_fusion": False,  # while layers are built: Megatron's own would ask for Apex's extension
    "cross_entropy_loss_fusion": False,  # its gradient is inexact, and log-probs do not use it
    "mtp_num_layers": None,  # multi-token prediction: its weights are neither loaded nor trained
}
# Fusions that are compiled for CUDA.
_WITHOUT_CUDA = {"bias_activation_fusion": False, "bias_dropout_fusion": False}


def _settings(params_dtype: torch.dtype, sequence_parallel: bool) -> dict[str, Any]:
    """Fields of Megatron's `TransformerConfig` that follow from the parallel state, the precision and the training."""
    from megatron.core import parallel_state

    interleaved = parallel_state.get_virtual_pipeline_model_parallel_world_size() is not None
    return {
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
        "sequence_parallel": sequence_parallel,
        "params_dtype": params_dtype,
        "pipeline_dtype": params_dtype,
        "autocast_dtype": params_dtype,
        "bf16": params_dtype == torch.bfloat16,
        "fp16": params_dtype == torch.float16,
        "calculate_per_token_loss": True,
        # under the interleaved schedule the exchange of shapes deadlocks: its micro-batches have one shape
        "variable_seq_lengths": not interleaved,
        # two stages exchange activations and gradients in both directions: one batch of sends would mix them up
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        DISPATCHER: "alltoall",  # Megatron asks for it with variable lengths, in dense models too; `gather_tokens`
        "should_pad_vocab": True,
        "make_vocab_size_divisible_by": 1,
    }


def _check_overrides(overrides: dict[str, Any], settings: dict[str, Any], known: set[str]) -> None:
    """Refuse overrides that have no effect, and those that contradict the strategy."""
    for name in overrides:
        if name in settings and name != DISPATCHER:
            raise ValueError(f"config_overrides: {name} is decided by the strategy and the trainer; set it there")
        if name not in known:
            close = difflib.get_close_matches(name, sorted(known), n=3)
            raise ValueError(
                f"config_overrides: {name!r} is no field of Megatron's TransformerConfig"
                + (f"; did you mean {' or '.join(close)}?" if close else "")
            )


def _check_model(overrides: dict[str, Any], settings: dict[str, Any], provider: Any) -> None:
    """Refuse settings that do not apply to this model, or that Megatron computes wrongly for it."""
    given = {**vars(provider), **settings, **overrides}
    experts = given["num_moe_experts"]
    parts = LayerParts(
        experts=bool(experts),
        dense_mlp=not all(expert_layers(provider)),
        shared_experts=bool(given["moe_shared_expert_intermediate_size"]),
        grouped_experts=bool(experts and given["moe_grouped_gemm"]),
        latent_attention=provider.multi_latent_attention,
    )
    check_recompute(overrides, parts)
    if settings["fp16"] and experts:
        raise ValueError(
            f"precision='16-mixed' with {experts} experts: Megatron keeps one loss scale for the experts and one for"
            " the other parameters, which part at the first overflow, and then one of them gets wrong gradients. Use"
            " precision='bf16-mixed'."
        )


class _Steps:
    """What is done with the chunks of a model that has been built.

    It belongs to Megatron's config, of which layers have copies, and which stages of a pipeline send each other: copies
    share it, and what is sent has none of it. All names of weights would go along.
    """

    def __init__(self, steps: Sequence[Callable[[list[Any]], Any]]) -> None:
        self._steps = steps

    def __call__(self, chunks: list[Any]) -> list[Any]:
        for step in self._steps:
            step(chunks)
        return chunks

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Steps":
        return self

    def __reduce__(self) -> tuple[type["_Steps"], tuple[list[Any]]]:
        return _Steps, ([],)


def _poison(chunks: list[Any]) -> None:
    """Fill parameters with NaN before weights are loaded, to detect those that are not loaded."""
    with torch.no_grad():
        for chunk in chunks:
            for _, tensor in _loaded_tensors(chunk):
                tensor.fill_(torch.nan)


def _loaded_tensors(chunk: Any) -> Iterator[tuple[str, Tensor]]:
    """Tensors that a checkpoint must have: the parameters, and the biases of routers, which are buffers."""
    yield from chunk.named_parameters()
    for name, buffer in chunk.named_buffers():
        if name.endswith(".expert_bias"):
            yield name, buffer
