"""The schema for editors accepts what the parser accepts, and marks what it refuses."""

import json
from typing import Any

import jsonschema
import pytest
import yaml

from lightning_megatron_rl.__main__ import main
from lightning_megatron_rl.schema.command import make_schema
from tests.command_line import ROOT, changed

GRPO = ROOT / "configs" / "demo" / "grpo.yaml"


@pytest.fixture(scope="module")
def validator() -> Any:
    schema = make_schema()
    jsonschema.Draft7Validator.check_schema(schema)
    return jsonschema.Draft7Validator(schema)


@pytest.mark.parametrize("config", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_is_valid(validator, config):
    assert list(validator.iter_errors(yaml.safe_load(config.read_text()))) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.max_stps", 3),
        ("trainer.max_steps", "many"),
        ("trainer.strategy.init_args.tensor_model_parallel_sise", 2),
        ("model.init_args.num_generation", 2),
        ("model.init_args.num_generations", "eight"),
        ("model.init_args.loss.clip_hgh", 0.3),
        ("model.init_args.engine.init_args.max_modl_len", 5),
        ("model.init_args.engine.init_args.dtype", "fp32"),
        ("model.init_args.train.optimizer.weight_deca", 0.1),
        ("data.init_args.batchsize", 5),
        ("trainer.callbacks.0.init_args.num_sample", 4),
        ("trainer.callbacks+", [{"class_path": "RolloutSamples", "init_args": {"num_sample": 4}}]),
        ("trainer.max_steps+", 4),
        ("modle", {}),
    ],
)
def test_mistakes_are_marked(validator, tmp_path, key, value):
    config = changed(GRPO, tmp_path / "config.yaml", key, value)
    assert list(validator.iter_errors(yaml.safe_load(config.read_text())))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.logger", False),
        ("trainer.devices", "auto"),
        ("model.init_args.train.optimizer.lr", "1e-6"),  # YAML 1.1 reads it as text, the parser as a number
        ("model.class_path", "my_package.MyModule"),
        ("trainer.strategy", "auto"),
        ("trainer.callbacks+", [{"class_path": "RolloutSamples"}]),  # adds to the list of the files before
        ("trainer.callbacks+", "RolloutSamples"),
        ("model.init_args.rewards+", ["my_rewards.short"]),
    ],
)
def test_what_the_parser_takes_is_not_marked(validator, tmp_path, key, value):
    config = changed(GRPO, tmp_path / "config.yaml", key, value)
    assert list(validator.iter_errors(yaml.safe_load(config.read_text()))) == []


def test_the_command_prints_it(capsys, validator):
    with pytest.raises(SystemExit) as exit_:
        main(["schema"])
    assert exit_.value.code == 0
    assert json.loads(capsys.readouterr().out) == validator.schema
