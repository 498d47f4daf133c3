"""Every config in `configs/` parses with the real command line and builds what it names."""

import dataclasses
import functools
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor

from lightning_megatron_rl.algorithms import Sequences
from lightning_megatron_rl.models.layers.lora import LoRASettings
from lightning_megatron_rl.strategy.megatron import MegatronStrategy
from tests.command_line import ROOT, Built, build
from tests.selection import by_default

GPU = ROOT / "configs" / "demo" / "gpu.yaml"  # an overlay of the others
DEMO = sorted(set((ROOT / "configs" / "demo").glob("*.yaml")) - {GPU})
LAYOUTS = sorted((ROOT / "configs" / "layouts").glob("*.yaml"))
LORA = ROOT / "configs" / "lora.yaml"
DISTILLATION = ROOT / "configs" / "distillation.yaml"
ALGORITHMS = sorted((ROOT / "configs" / "algorithms").glob("*.yaml"))
STREAMING = sorted((ROOT / "configs" / "streaming").glob("*.yaml"))
RECIPES = sorted((ROOT / "configs" / "recipes").glob("*/*.yaml"))  # tests/recipes
GRPO = ROOT / "configs" / "demo" / "grpo.yaml"


def test_all_configs_are_known_here():
    known = [*DEMO, GPU, *LAYOUTS, *ALGORITHMS, *STREAMING, *RECIPES, LORA, DISTILLATION]
    assert sorted((ROOT / "configs").rglob("*.y*ml")) == sorted(known)
    assert len(DEMO) >= 2
    assert len(LAYOUTS) >= 3


@functools.cache
def plain(config: Path) -> Built:
    """A config without overlays, to compare with: a build takes seconds."""
    return build("fit", "--config", config)


COMBINATIONS = [(config, layout) for layout in (None, *LAYOUTS) for config in DEMO]


@pytest.mark.parametrize(
    "combination",
    by_default([(config, layout) for config, layout in COMBINATIONS if layout is None or config == GRPO], COMBINATIONS),
    ids=lambda found: f"{found[1].stem if found[1] else 'as it is'}-{found[0].stem}",
)
def test_config_builds(combination: tuple[Path, Path | None]):
    config, layout = combination
    cli = plain(config) if layout is None else build("fit", "--config", config, "--config", layout)
    assert isinstance(cli.trainer.strategy, MegatronStrategy)
    base = yaml.safe_load(config.read_text())["trainer"]
    expected = dict(base["strategy"]["init_args"])
    devices = base["devices"]
    if layout is not None:
        changes = yaml.safe_load(layout.read_text())["trainer"]
        expected |= changes["strategy"]["init_args"]
        devices = changes.get("devices", devices)
    used = cli.config["fit"]["trainer"]["strategy"]["init_args"]
    assert {name: used[name] for name in expected} == expected  # the overlay's values, and all others of the base
    assert cli.trainer.num_devices == devices
    assert cli.trainer.strategy.layout.data_parallel_size(devices) >= 1
    assert cli.config["fit"]["trainer"]["inference_mode"] is False  # Megatron could not update inference tensors
    assert type(cli.model).__name__ in ("SFTModule", "GRPOModule", "PPOModule", "DPOModule", "RewardModule")


@pytest.mark.parametrize("config", by_default([GRPO], DEMO), ids=lambda path: path.stem)
def test_gpu_overlay_moves_the_demo_to_every_gpu(config: Path):
    """With the accelerator given back, since none may be here: the rest is what the overlay says."""
    cli = build(
        "fit", "--config", config, "--config", GPU, "--trainer.accelerator", "cpu", "--trainer.devices", "1",
        "--trainer.precision", "32-true",
    )  # fmt: skip
    assert cli.trainer.strategy.layout.tensor_model_parallel_size == 1
    assert not cli.trainer.strategy.layout.sequence_parallel
    overlay = yaml.safe_load(GPU.read_text())["trainer"]
    assert {name: overlay[name] for name in ("accelerator", "devices", "precision")} == {
        "accelerator": "gpu", "devices": "auto", "precision": "bf16-mixed",
    }  # fmt: skip


@pytest.mark.parametrize("config", by_default([GRPO], DEMO), ids=lambda path: path.stem)
def test_lora_overlay_adds_adapters_and_nothing_else(config: Path):
    base, adapted = plain(config), build("fit", "--config", config, "--config", LORA)
    assert base.model.train_settings.lora is None
    assert dataclasses.asdict(adapted.model.train_settings.lora) == {
        **dataclasses.asdict(LoRASettings()),
        **yaml.safe_load(LORA.read_text())["model"]["init_args"]["train"]["lora"],
    }
    assert base.config["fit"]["trainer"] == adapted.config["fit"]["trainer"]
    ours, theirs = (dict(cli.config["fit"]["model"]["init_args"].as_dict()) for cli in (base, adapted))
    assert {name for name in ours if ours[name] != theirs[name]} == {"train"}
    assert {name for name, value in ours["train"].items() if value != theirs["train"][name]} == {"lora"}
    assert ours.keys() == theirs.keys()


def test_distillation_overlay_names_a_teacher_and_weighs_no_reward():
    distilled = build("fit", "--config", GRPO, "--config", DISTILLATION)
    assert distilled.model.reference_settings.model == "runs/demo/grpo/hf/last"
    assert distilled.model.reward_weights == [0.0]
    assert distilled.model.loss.config.kl_estimator == "k2"
    ours, theirs = (dict(cli.config["fit"]["model"]["init_args"].as_dict()) for cli in (plain(GRPO), distilled))
    assert {name for name in ours if ours[name] != theirs[name]} == {"loss", "reference", "reward_weights"}


@pytest.mark.parametrize("config", [GRPO, ROOT / "configs" / "demo" / "ppo.yaml"], ids=lambda path: path.stem)
@pytest.mark.parametrize("overlay", STREAMING, ids=lambda path: path.stem)
def test_streaming_overlay_sets_a_bound(config: Path, overlay: Path):
    streamed = build("fit", "--config", config, "--config", overlay).model.streamed
    assert streamed is not None
    assert streamed.settings.max_staleness == 2


class Scaling:
    """A correction with a setting."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def __call__(self, old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Tensor:
        return self.scale * mask.float()


@pytest.mark.parametrize("overlay", ALGORITHMS, ids=lambda path: path.stem)
def test_algorithm_overlay_sets_what_it_says_and_nothing_else(overlay: Path):
    """What the overlay names has its value; what it does not name is as in the base, also inside `loss`."""
    grpo = plain(GRPO)
    method = build("fit", "--config", GRPO, "--config", overlay)
    changes = yaml.safe_load(overlay.read_text())["model"]["init_args"]
    written = yaml.safe_load(method.parser.dump(method.config, skip_none=False))["fit"]["model"][
        "init_args"
    ]  # as a run's config.yaml
    assert {name: written["loss"][name] for name in changes["loss"]} == changes["loss"]
    loss = changes.pop("loss")
    assert dataclasses.asdict(method.model.loss.config) == {**dataclasses.asdict(grpo.model.loss.config), **loss}
    for name, settings in changes.items():
        assert dataclasses.asdict(getattr(method.model, name)) == settings
    ours, theirs = (dict(cli.config["fit"]["model"]["init_args"].as_dict()) for cli in (grpo, method))
    assert {name for name in ours if ours[name] != theirs[name]} <= {"loss", *changes}
    assert grpo.config["fit"]["trainer"] == method.config["fit"]["trainer"]


def test_every_method_of_the_table_has_its_overlay():
    table = (ROOT / "docs" / "algorithms.md").read_text()
    for overlay in ALGORITHMS:
        assert f"algorithms/{overlay.name}" in table, overlay


def reinforce(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, sequences: Sequences | None = None
) -> tuple[Tensor, Tensor]:
    return -advantages * logprobs, torch.ones_like(advantages)


class Scaled:
    """A policy loss with a setting."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def __call__(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, sequences: Sequences | None = None
    ) -> tuple[Tensor, Tensor]:
        return -self.scale * advantages * logprobs, torch.ones_like(advantages)


def test_functions_and_classes_of_the_users_own_in_yaml(tmp_path: Path):
    """A dotted path and a class_path with init_args; also of the kinds that return a tensor, not a tuple of them."""
    scaled = {"class_path": f"{__name__}.Scaled", "init_args": {"scale": 2.5}}
    halved = {"class_path": f"{__name__}.Scaling", "init_args": {"scale": 0.5}}
    for policy_loss, correction, value in ((f"{__name__}.reinforce", "tis", 2.0), (scaled, halved, 5.0)):
        overlay = tmp_path / "own.yaml"
        own = {"loss": {"policy_loss": policy_loss, "correction": correction}}
        overlay.write_text(yaml.safe_dump({"model": {"init_args": own}}))
        cli = build("fit", "--config", GRPO, "--config", overlay)
        written = yaml.safe_load(cli.parser.dump(cli.config, skip_none=False))["fit"]["model"]["init_args"]["loss"]
        assert {name: written[name] for name in own["loss"]} == own["loss"]
        token = torch.tensor([-2.0])
        assert cli.model.loss.policy_loss(token, token, torch.tensor([1.0]), None)[0].item() == value
        weights = cli.model.loss.correction_weights(token, token, torch.tensor([True]))
        assert weights.item() == (1.0 if correction == "tis" else 0.5)


def test_unknown_method_in_yaml_lists_what_exists(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    overlay = tmp_path / "typo.yaml"
    overlay.write_text(yaml.safe_dump({"model": {"init_args": {"loss": {"policy_loss": "gpso"}}}}))
    with pytest.raises(SystemExit):
        build("fit", "--config", GRPO, "--config", overlay)
    assert (
        "unknown policy loss 'gpso': choose one of cispo, gspo, luspo, ppo_clip, sapo, vespo" in capsys.readouterr().err
    )
