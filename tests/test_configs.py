"""Every config in `configs/` parses with the real command line and builds what it names."""

import dataclasses
from pathlib import Path

import pytest
import yaml

from lightning_megatron_rl.models.lora import LoRASettings
from lightning_megatron_rl.strategy.megatron import MegatronStrategy
from tests.command_line import ROOT, build

DEMO = sorted((ROOT / "configs" / "demo").glob("*.yaml"))
LAYOUTS = sorted((ROOT / "configs" / "layouts").glob("*.yaml"))
LORA = ROOT / "configs" / "lora.yaml"


def test_all_configs_are_known_here():
    assert sorted((ROOT / "configs").rglob("*.y*ml")) == sorted([*DEMO, *LAYOUTS, LORA])
    assert len(DEMO) >= 2
    assert len(LAYOUTS) >= 3


@pytest.mark.parametrize("config", DEMO, ids=lambda path: path.stem)
@pytest.mark.parametrize("layout", [None, *LAYOUTS], ids=lambda path: path.stem if path else "as it is")
def test_config_builds(config: Path, layout: Path | None):
    overlay = [] if layout is None else ["--config", layout]
    cli = build("fit", "--config", config, *overlay)
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


@pytest.mark.parametrize("config", DEMO, ids=lambda path: path.stem)
def test_lora_overlay_adds_adapters_and_nothing_else(config: Path):
    plain, adapted = build("fit", "--config", config), build("fit", "--config", config, "--config", LORA)
    assert plain.model.lora is None
    assert dataclasses.asdict(adapted.model.lora) == {
        **dataclasses.asdict(LoRASettings()),
        **yaml.safe_load(LORA.read_text())["model"]["init_args"]["lora"],
    }
    assert plain.config["fit"]["trainer"] == adapted.config["fit"]["trainer"]
    ours, theirs = (dict(cli.config["fit"]["model"]["init_args"].as_dict()) for cli in (plain, adapted))
    assert {name for name in ours if ours[name] != theirs[name]} == {"lora"}
    assert ours.keys() == theirs.keys()
