"""The command line: what it accepts, what it refuses and in which words."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import yaml

import lightning_megatron_rl
from lightning_megatron_rl import cli
from lightning_megatron_rl.__main__ import main
from lightning_megatron_rl.callbacks.rollout_samples import RolloutSamples
from lightning_megatron_rl.cli import _is_refusal, explain
from lightning_megatron_rl.devices.facts import DeviceFacts
from lightning_megatron_rl.environments import Environment
from lightning_megatron_rl.models.hf.files import read_header
from lightning_megatron_rl.strategy.megatron import MegatronStrategy
from tests.command_line import ROOT, build, changed

GRPO = ROOT / "configs" / "demo" / "grpo.yaml"
SFT = ROOT / "configs" / "demo" / "sft.yaml"


def refusal(capsys: pytest.CaptureFixture[str], *args: str | Path, **environment: str) -> str:
    """The message with which `args` are refused: short, without usage, with code 2."""
    with pytest.raises(SystemExit) as exit_:
        build(*args, **environment)
    shown = capsys.readouterr().err
    message = shown[shown.index("lightning-megatron-rl") :]  # after what loggers said
    assert exit_.value.code == 2
    assert "error: " in message
    assert "usage:" not in message
    assert len(message.splitlines()) <= 3, message
    return message


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("trainer.max_stps", 3, "unknown key trainer.max_stps; did you mean trainer.max_steps?"),
        (
            "trainer.strategy.init_args.tensor_model_parallel_sise",
            2,
            "unknown key trainer.strategy.tensor_model_parallel_sise; did you mean tensor_model_parallel_size?",
        ),
        ("trainer.callbacks.1.init_args.dirpth", "x", "trainer.callbacks.dirpth; did you mean dirpath?"),
        ("trainer.strategy.class_path", "MegatronStratgy", "unknown class MegatronStratgy; did you mean Megatron"),
        ("trainer.max_steps", "many", "trainer.max_steps: expected int, got many"),
        ("model.class_path", "GRPOModul", "model: unknown class GRPOModul; did you mean GRPOModule?"),
        ("model.init_args.num_generation", 2, "unknown key model.num_generation; did you mean num_generations?"),
        ("model.init_args.loss.clip_hgh", 0.3, "unknown key model.loss.clip_hgh; did you mean clip_high?"),
        ("model.init_args.sampling.temprature", 1.0, "model.sampling.temprature; did you mean temperature?"),
        ("model.init_args.engine.init_args.max_modl_len", 5, "model.engine.max_modl_len; did you mean max_model_len?"),
        (
            "model.init_args.train.optimizer.weight_deca",
            0.1,
            "model.train.optimizer.weight_deca; did you mean weight_decay?",
        ),
        (
            "model.init_args.train.layer_backend",
            "trch",
            "model.train.layer_backend: expected one of ['auto', 'torch', 't",
        ),
        ("model.init_args.rewards", ["nowhere.f"], "model.rewards: No module named 'nowhere'"),
        ("data.init_args.batchsize", 5, "unknown key data.batchsize; did you mean batch_size?"),
        ("data.init_args.train.init_args.sise", 5, "unknown key data.train.sise; did you mean size?"),
        (
            "model.init_args.train.optimizer.learning_rate",
            1e-5,
            "unknown key model.train.optimizer.learning_rate; did you mean lr?",
        ),
        ("model.init_args.train.optimizer.momentum", 0.9, "model.train.optimizer.momentum; did you mean sgd_momentum?"),
        ("model.init_args.train.optimizer.betas", 0.9, "unknown key model.train.optimizer.betas; nearest: "),
        ("model.init_args.sampling", None, "model.sampling is null, and is always needed: leave it out for its defaul"),
        (
            "optimizer",
            {"lr": 1.0},
            "unknown key optimizer.lr; did you mean model.train.optimizer.lr?",
        ),
        ("model.init_args.train.learning_rate", 1e-5, "key model.train.learning_rate; did you mean optimizer.lr?"),
        ("model.init_args.weight_decay", 0.1, "key model.weight_decay; did you mean train.optimizer.weight_decay?"),
        ("optimiser", {"x": 1.0}, "unknown key optimiser.x; known: ckpt_path, config, data, model, seed_everything"),
        # refused by the classes themselves, in their words
        (
            "model.init_args.loss.advantage",
            "grpoo",
            "unknown advantage estimator 'grpoo': choose one of dr_grpo, grpo,",
        ),
        ("model.init_args.loss.correction", "tiss", "unknown correction 'tiss': choose one of geo_mask, icepop, tis"),
        ("model.init_args.loss.aggregation", "mean", "unknown aggregation 'mean': choose one of"),
        ("model.init_args.num_generations", 1, "num_generations=1"),
        ("trainer.strategy.init_args.timeout_s", 0, "timeout_s=0.0 must be above 0: seconds after which a collective"),
    ],
)
def test_mistake_in_yaml_is_named(capsys, tmp_path, key, value, expected):
    assert expected in refusal(capsys, "fit", "--config", changed(GRPO, tmp_path / "config.yaml", key, value))


@pytest.mark.parametrize("section", ["model", "data"])
def test_overlay_before_its_base_is_refused(capsys, tmp_path, section):
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text(f"{section}: {{init_args: {{batch_size: 3}}}}")
    said = refusal(capsys, "fit", "--config", overlay, "--config", GRPO)
    assert f"unknown key {section}.batch_size: nothing before it gives {section} a class_path" in said


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("model.init_args.train.optimizer.lr", -1e-4, "optimizer.lr=-0.0001 must be above 0"),
        ("model.init_args.train.optimizer.weight_decay", -0.1, "optimizer.weight_decay=-0.1 must be at least 0"),
        ("model.init_args.train.optimizer.adam_beta2", 1.0, "optimizer.adam_beta2=1.0 must be in [0, 1)"),
        ("model.init_args.max_failed_rollouts", 0, "max_failed_rollouts=0 must be at least 1"),
        ("data.init_args.train", "", "a data set's path is ''"),
        (
            "model.init_args.engine.init_args.vllm_args",
            {"max_num_batchd_tokens": 9},
            "engine.vllm_args: the installed vLLM has no argument max_num_batchd_tokens; did you mean max_num_batched",
        ),
        (
            "model.init_args.engine.init_args.vllm_args",
            {"logprobs_mode": "raw_logprobs"},
            "engine.vllm_args: logprobs_mode is not passed through: the trainer would score another distribution",
        ),
        (
            "model.init_args.environment",
            {"class_path": "tests.test_cli.NoStart"},
            "tests.test_cli.NoStart has no method start(prompt: Prompt, seed: int) -> Episode, which Environment asks",
        ),
        (
            "model.init_args.environment",
            {"class_path": "tests.test_cli.Inherits"},
            "has no method start(prompt, seed), which returns an episode",
        ),
        (
            "model.init_args.rewards",
            ["tests.test_cli.untyped_reward"],
            "untyped_reward(samples) is to be tests.test_cli.untyped_reward(samples: list[Sample]) -> list[float], with"
            " these annotations (from lightning_megatron_rl import Sample)",
        ),
        (
            "model.init_args.environment",
            "tests.test_cli.Untyped",
            "tests.test_cli.Untyped is no Environment: start(prompt, seed) is to be start(prompt: Prompt, seed: int)",
        ),
        ("model.init_args.engine", "tests.test_cli.NoStart", "tests.test_cli.NoStart has no method "),
        (
            "model.init_args.rewards",
            [{"class_path": "tests.test_cli.untyped_reward", "init_args": {"budget": 3}}],
            "the reward tests.test_cli.untyped_reward is a function, which has no settings: init_args {'budget': 3}",
        ),
        (
            "model.init_args.rewards",
            ["ExactMatch"],
            "model.rewards: a reward is named by its path: lightning_megatron_rl.rewards.ExactMatch",
        ),
    ],
)
def test_values_that_would_only_fail_later_are_named(capsys, tmp_path, key, value, expected):
    assert expected in refusal(capsys, "fit", "--config", changed(GRPO, tmp_path / "config.yaml", key, value))


class NoStart:
    """No environment."""


class Inherits(Environment):
    """Has only what the protocol says."""


class Untyped:
    """An environment without annotations."""

    def start(self, prompt, seed):
        return None


def untyped_reward(samples):
    return [0.0] * len(samples)


def test_yaml_that_is_none_is_named_with_its_place(capsys, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("trainer:\n  max_steps: 3\n max_epochs: 2\n")
    message = refusal(capsys, "fit", "--config", config)
    assert f"{config}, line 3, column 2: " in message
    assert "unicode string" not in message
    config.write_text("")
    assert f"{config} is empty" in refusal(capsys, "fit", "--config", GRPO, "--config", config)


def test_bad_yaml_is_refused_before_anything_is_imported(capsys, tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text("trainer: [1,\n")
    monkeypatch.setitem(sys.modules, "lightning_megatron_rl.cli", None)  # importing it is an error
    with pytest.raises(SystemExit) as exit_:
        main(["fit", f"--config={tmp_path / 'config.yaml'}"])
    assert exit_.value.code == 2
    assert f"fit: error: {tmp_path / 'config.yaml'}, line 2, column 1: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "expected"),
    [((), "bf16-mixed"), (("--trainer.precision", "32-true"), "32-true"), (("--trainer.accelerator", "cpu"), None)],
)
def test_bf16_is_the_default_on_gpus(monkeypatch, tmp_path, options, expected):
    class StoppedError(Exception):
        pass

    def stop(self: cli.CommandLine) -> None:
        raise StoppedError(self.config["fit"]["trainer"]["precision"])

    monkeypatch.setattr(cli, "count_gpus", lambda: 8)
    monkeypatch.setattr(cli.CommandLine, "instantiate_classes", stop)
    config = changed(GRPO, tmp_path / "config.yaml", "trainer.accelerator", "gpu")
    config = changed(config, tmp_path / "config.yaml", "trainer.precision", None)
    with pytest.raises(StoppedError) as stopped:
        build("fit", "--config", config, *options)
    assert stopped.value.args == (expected,)


def test_mistake_on_the_command_line_is_named(capsys):
    def message(*args: str, **environment: str) -> str:
        return refusal(capsys, *args, **environment)

    base = ("fit", "--config", str(GRPO))
    assert "unknown key trainer.max_stps; did you mean trainer.max_steps?" in message(*base, "--trainer.max_stps", "3")
    assert "unknown key model.loss.clip_hgh; did you mean clip_high?" in message(*base, "--model.loss.clip_hgh", "3")
    assert "'fti' (choose from 'fit', 'validate', 'test', 'predict')" in message("fti")
    assert "nowhere.yaml" in message("fit", "--config", "nowhere.yaml")
    assert "fit.data, fit.model. Give a config, which has them: --config FILE" in message("fit")
    assert "unknown key foo; known: ckpt_path, config, data, model, seed_everything, trainer, we" in message(
        *base, "--foo", "3"
    )
    assert "PL_FIT__TRAINER__MAX_STPS; did you mean PL_FIT__TRAINER__MAX_STEPS?" in message(
        *base, PL_FIT__TRAINER__MAX_STPS="3"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what must be absent")
def test_absent_gpu_is_refused_with_the_remedy(capsys):
    message = refusal(capsys, "fit", "--config", GRPO, "--trainer.accelerator", "gpu")
    assert "trainer.accelerator=gpu" in message
    assert "--trainer.accelerator cpu" in message


@pytest.mark.parametrize("accelerator", ["auto", "gpu"])
def test_driver_that_is_too_old_is_refused_and_cpu_is_the_way_out(capsys, monkeypatch, accelerator):
    facts = DeviceFacts("2.11.0+cu130", torch_cuda=(13, 0), driver=(535, 104, 5))
    monkeypatch.setattr(cli, "count_gpus", lambda: 0)
    monkeypatch.setattr(cli, "measure_devices", lambda *, imports: facts)
    message = refusal(capsys, "fit", "--config", SFT, "--trainer.accelerator", accelerator)
    assert f"trainer.accelerator={accelerator}: the NVIDIA driver 535.104.5 is too old" in message
    assert "--trainer.accelerator cpu" in message
    build("fit", "--config", SFT, "--trainer.accelerator", "cpu")


def test_auto_runs_on_the_cpu_where_there_is_no_driver(monkeypatch):
    monkeypatch.setattr(cli, "count_gpus", lambda: 0)
    monkeypatch.setattr(cli, "measure_devices", lambda *, imports: DeviceFacts("2.11.0+cu130", torch_cuda=(13, 0)))
    build("fit", "--config", SFT, "--trainer.accelerator", "auto", "--trainer.devices", "1")


@pytest.mark.parametrize("accelerator", ["auto", "gpu"])
def test_more_processes_than_gpus_are_refused(capsys, monkeypatch, tmp_path, accelerator):
    monkeypatch.setattr(cli, "count_gpus", lambda: 2)
    expected = f"trainer.accelerator={accelerator}: 4 processes on this node, on which torch sees 2 GPUs"
    options = ("--trainer.accelerator", accelerator)
    assert expected in refusal(capsys, "fit", "--config", SFT, *options, "--trainer.devices", "4")
    config = changed(SFT, tmp_path / "config.yaml", "trainer.devices", 4)
    assert expected in refusal(capsys, "fit", "--config", config, *options)


def test_gpus_do_not_limit_processes_on_the_cpu(monkeypatch):
    monkeypatch.setattr(cli, "count_gpus", lambda: 2)
    build("fit", "--config", SFT, "--trainer.accelerator", "cpu", "--trainer.devices", "4")


@pytest.mark.parametrize("devices", ["many", "-1", "[0]"])
def test_processes_on_the_cpu_that_are_no_number_are_refused(capsys, devices):
    options = ("--trainer.accelerator", "cpu", "--trainer.devices", devices)
    assert "`devices` selected with `CPUAccelerator` should be an int > 0" in refusal(
        capsys, "fit", "--config", SFT, *options
    )


def test_debug_switch_shows_where_a_value_was_refused(tmp_path):
    config = changed(GRPO, tmp_path / "config.yaml", "model.init_args.loss.advantage", "grpoo")
    with pytest.raises(ValueError, match="grpoo"):
        build("fit", "--config", config, JSONARGPARSE_DEBUG="true")


def test_a_file_that_cannot_be_read_is_refused_like_a_value(tmp_path):
    """It is Python's pathlib that raises, on behalf of this package, or of a user's own code."""
    with pytest.raises(IsADirectoryError, match=re.escape(str(tmp_path))) as ours:
        read_header(tmp_path)
    assert _is_refusal(ours.value)
    with pytest.raises(IsADirectoryError) as theirs:
        tmp_path.read_bytes()
    assert not _is_refusal(theirs.value)


@pytest.mark.parametrize("value", [None, 3])
def test_unknown_section_is_named_also_when_the_config_is_printed(capsys, tmp_path, value):
    """jsonargparse has other words for it with `--print_config`."""
    config = changed(GRPO, tmp_path / "config.yaml", "train", value)
    for rest in ([], ["--print_config"]):
        message = refusal(capsys, "fit", "--config", config, *rest)
        assert "unknown key train; did you mean trainer?" in message


def test_messages_of_other_shapes_are_passed_on():
    assert explain("no nesting here") == "no nesting here"
    assert explain("Parser key \"a\":\n  Expected a <class 'int'>. Got value: b") == "a: expected int, got b"


def test_printed_config_parses_again_to_the_same(capsys, tmp_path):
    for config in (GRPO, SFT):
        texts = []
        for source in (config, tmp_path / "printed.yaml"):
            with pytest.raises(SystemExit) as exit_:
                build("fit", "--config", source, "--print_config")
            assert exit_.value.code == 0
            texts.append(capsys.readouterr().out)
            (tmp_path / "printed.yaml").write_text(texts[-1])
        assert texts[0] == texts[1]
        printed = build("fit", "--config", tmp_path / "printed.yaml")
        assert (
            printed.model.train_settings.optimizer.lr
            == yaml.safe_load(texts[0])["model"]["init_args"]["train"]["optimizer"]["lr"]
        )


def test_later_settings_win(tmp_path):
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text("trainer: {max_steps: 5}\nmodel: {init_args: {loss: {clip_high: 0.31}}}\n")
    arguments = ("fit", "--config", GRPO, "--config", overlay)
    cli = build(*arguments)
    assert cli.trainer.max_steps == 5
    assert cli.model.loss.config.clip_high == 0.31
    assert cli.model.loss.config.kl_coef == yaml.safe_load(GRPO.read_text())["model"]["init_args"]["loss"]["kl_coef"]
    assert build(*arguments, "--trainer.max_steps", "6").trainer.max_steps == 6
    assert build(*arguments, "--model.loss.clip_high", "0.4").model.loss.config.clip_high == 0.4


def test_environment_variables_set_what_nothing_else_does(tmp_path):
    without = changed(GRPO, tmp_path / "config.yaml", "seed_everything", 1234)
    config = yaml.safe_load(without.read_text())
    del config["trainer"]["max_steps"]
    without.write_text(yaml.safe_dump(config))
    assert build("fit", PL_FIT__CONFIG=str(without), PL_FIT__TRAINER__MAX_STEPS="7").trainer.max_steps == 7
    given = build("fit", "--config", GRPO, "--trainer.max_steps", "8", PL_FIT__TRAINER__MAX_STEPS="7")
    assert given.trainer.max_steps == 8


def test_classes_are_known_by_their_short_names(tmp_path):
    config = changed(GRPO, tmp_path / "config.yaml", "trainer.callbacks", ["WeightSync", "RolloutSamples"])
    cli = build("fit", "--config", config)
    kinds = {type(part).__name__ for part in [cli.model, cli.datamodule, cli.trainer.strategy, cli.model.engine]}
    assert kinds == {"GRPOModule", "PromptDataModule", "MegatronStrategy", "VLLMEngine"}
    assert {"WeightSync", "RolloutSamples"} <= {type(callback).__name__ for callback in cli.trainer.callbacks}
    cli = build("validate", "--config", SFT)
    assert {type(cli.model).__name__, type(cli.datamodule).__name__} == {"SFTModule", "SFTDataModule"}
    assert "HFExport" in {type(callback).__name__ for callback in cli.trainer.callbacks}


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_an_evaluation_without_a_validation_set_is_refused(tmp_path, capsys, command: str):
    config = changed(SFT, tmp_path / "config.yaml", "data.init_args.val", None)
    build("fit", "--config", config)
    with pytest.raises(SystemExit) as exit_:
        build(command, "--config", config)
    assert exit_.value.code == 2
    assert f"{command}: error: data.val names no rows, which {command} runs on" in capsys.readouterr().err


def test_strategy_by_name(tmp_path):
    by_name = build("fit", "--config", changed(GRPO, tmp_path / "config.yaml", "trainer.strategy", "megatron"))
    assert type(by_name.trainer.strategy) is MegatronStrategy
    script = (
        "import lightning as L, lightning_megatron_rl\n"
        "trainer = L.Trainer(strategy='megatron', accelerator='cpu', devices=1, logger=False)\n"
        "assert type(trainer.strategy) is lightning_megatron_rl.MegatronStrategy"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=120)


@pytest.mark.parametrize(("options", "name"), [(("--trainer.strategy", "ddp"), "DDP"), ((), "SingleDevice")])
def test_another_strategy_is_refused_before_anything_is_written(capsys, tmp_path, options, name):
    """Also one that was forgotten; the directory is that of a finished run."""
    (tmp_path / "metrics.csv").write_text("step\n1\n")
    config = changed(GRPO, tmp_path / "config.yaml", "trainer.strategy", "auto")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    place = ("--trainer.logger.save_dir", str(tmp_path))
    message = refusal(capsys, "fit", "--config", config, *options, *place, "--trainer.devices", "1")
    assert f"trainer.strategy: GRPOModule runs on MegatronStrategy, the Trainer has {name}Strategy: use" in message
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_help_and_version_are_light():
    script = (
        "import sys; from lightning_megatron_rl.__main__ import main; main(['--help']); main(['--version'])\n"
        "assert not {'torch', 'lightning', 'jsonargparse'} & set(sys.modules)"
    )
    command = [sys.executable, "-c", script]
    shown = subprocess.run(command, cwd=ROOT, check=True, timeout=180, capture_output=True, text=True).stdout
    assert "--print_completion" in shown
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert shown.endswith(f"lightning-megatron-rl {version}\n")
    assert lightning_megatron_rl.__version__ == version


def test_versions_of_a_source_tree_that_is_not_installed():
    script = (  # without site-packages
        "from lightning_megatron_rl.utilities.versions import installed_versions\n"
        "print(installed_versions(('lightning-megatron-rl', 'torch')))"
    )
    command = [sys.executable, "-S", "-c", script]
    shown = subprocess.run(command, cwd=ROOT, check=True, timeout=60, capture_output=True, text=True).stdout
    assert shown.strip() == repr({"lightning-megatron-rl": lightning_megatron_rl.__version__})


def test_help_of_commands_and_classes(capsys):
    for arguments, text in (
        (["fit", "--help"], "--trainer.max_steps MAX_STEPS"),
        (["fit", "--model.help", "GRPOModule"], "Responses per prompt (the group)."),
        (["fit", "--trainer.strategy.help", "MegatronStrategy"], "Ways each weight matrix is split."),
        (["fit", "--data.help", "PromptDataModule"], "Prompts per rollout, over all ranks."),
    ):
        with pytest.raises(SystemExit) as exit_:
            build(*arguments)
        assert exit_.value.code == 0
        assert text in " ".join(capsys.readouterr().out.split())


def test_shell_completion(capsys, tmp_path):
    with pytest.raises(SystemExit) as exit_:
        build("--print_completion", "bash")
    assert exit_.value.code == 0
    script = capsys.readouterr().out
    assert len(script) < 100_000  # what jsonargparse would print is a thousand times this
    (tmp_path / "completion.sh").write_text(script)
    ask = """
        source "$1"; shift
        complete -p lightning-megatron-rl >/dev/null || exit 1
        COMP_WORDS=(lightning-megatron-rl "$@"); COMP_CWORD=$#
        _shtab_lightning_megatron_rl lightning-megatron-rl "${COMP_WORDS[-1]}" "${COMP_WORDS[-2]}"
        echo "${COMPREPLY[@]}"
    """
    with pytest.raises(SystemExit):
        build("--print_completion=shtab-bash")  # as jsonargparse has it, whose own takes minutes
    assert capsys.readouterr().out == script
    for typed, completed in (
        (["v"], "validate"),
        (["fit", "--trainer.max_s"], "--trainer.max_steps"),
        (["fit", "--model.num_gen"], "--model.num_generations"),
        (["fit", "--model", "GR"], "GRPOModule"),
        (["fit", "--config", "conf"], "configs"),
    ):
        command = ["bash", "-c", ask, "bash", str(tmp_path / "completion.sh"), *typed]
        assert subprocess.check_output(command, text=True, cwd=ROOT, timeout=20).split() == [completed]
    assert "--print_completion ksh: name one of bash, zsh" in refusal(capsys, "--print_completion", "ksh")


def test_a_config_is_saved_beside_those_of_other_runs(tmp_path):
    """Under a name of its own, unless it is the same; whichever command and run comes second."""

    def save(command: str, *args: str) -> None:
        logger = ("--trainer.logger.init_args.save_dir", str(tmp_path))
        built = build(command, "--config", SFT, *logger, *args)
        (callback,) = [it for it in built.trainer.callbacks if isinstance(it, cli.ConfigOfRun)]
        callback.setup(built.trainer, built.model, command)

    def saved() -> dict[str, int]:
        files = sorted((tmp_path / "sft").iterdir())
        return {file.name: yaml.safe_load(file.read_text())["trainer"]["max_steps"] for file in files}

    save("fit")
    first = (tmp_path / "sft" / "config.yaml").read_bytes()
    save("fit")
    assert saved() == {"config.yaml": 230}
    save("fit", "--trainer.max_steps", "7")
    save("validate", "--trainer.max_steps", "8")
    save("fit", "--trainer.max_steps", "7")
    assert saved() == {"config-2.yaml": 7, "config-3.yaml": 8, "config.yaml": 230}
    assert (tmp_path / "sft" / "config.yaml").read_bytes() == first


def test_predict_writes_its_predictions():
    """Without a callback of the user's: the command has no other way to give them."""
    callbacks = build("validate", "--config", SFT).trainer.callbacks
    assert [type(it).__name__ for it in callbacks].count("RunReport") == 1
    assert [type(it).__name__ for it in callbacks].count("PredictionFiles") == 1


def test_classes_are_built_for_a_caller_who_runs_them(tmp_path, monkeypatch, capsys):
    """`run=False`, as with any LightningCLI: no subcommand in the config, and mistakes are refused as always."""
    from lightning_megatron_rl.cli import CommandLine
    from lightning_megatron_rl.modules.sft import SFTModule

    config = yaml.safe_load((ROOT / "configs" / "demo" / "sft.yaml").read_text())
    config["trainer"]["accelerator"] = "cpu"
    config["seed_everything"] = False
    config["model"]["init_args"]["model"] = config["data"]["init_args"]["tokenizer"] = str(tmp_path)
    monkeypatch.setattr(sys, "argv", ["script.py"])
    monkeypatch.setenv("PL_TRAINER__MAX_STEPS", "3")
    config["trainer"].pop("max_steps", None)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    cli_ = CommandLine(["--config", str(tmp_path / "config.yaml")], run=False)
    assert isinstance(cli_.model, SFTModule)
    assert isinstance(cli_.trainer.strategy, MegatronStrategy)
    assert cli_.trainer.max_steps == 3
    for arguments, environment, said in (
        (["--trainer.max_stps", "3"], {}, "did you mean trainer.max_steps?"),
        ([], {"PL_TRAINER__MAX_STPS": "3"}, "unknown environment variable PL_TRAINER__MAX_STPS"),
        (["--trainer.gradient_clip_algorithm", "nobody"], {}, "gradient_clip_algorithm"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            with pytest.raises(SystemExit):
                CommandLine(["--config", str(tmp_path / "config.yaml"), *arguments], run=False)
        assert said in capsys.readouterr().err


def test_old_flat_key_is_refused_with_its_new_place(capsys, tmp_path):
    """In YAML and on the command line, in the long spelling and the short one."""
    expected = "`{0}` is now `train.{0}`. Write model.train.{1}."
    for key, value in (("optimizer", {"lr": 1.0}), ("max_tokens_per_microbatch", 64), ("lora", {"rank": 4})):
        inner = next(iter(value), None) if isinstance(value, dict) else None
        written = f"{key}.{inner}" if inner else key
        message = expected.format(key, written)
        config = changed(GRPO, tmp_path / "config.yaml", f"model.init_args.{key}", value)
        assert message in refusal(capsys, "fit", "--config", config)
        for start in ("--model", "--model.init_args"):
            assert message in refusal(capsys, "fit", "--config", GRPO, f"{start}.{written}", "4")


def test_a_limit_of_one_is_one_batch(tmp_path):
    """As in Python, where 1.0 is all batches; parsers read 1 as that."""
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text("trainer: {limit_test_batches: 1, limit_predict_batches: 0.5}")
    limits = ["--trainer.limit_val_batches", "1", "--trainer.limit_train_batches=1.0"]
    trainer = build("fit", "--config", SFT, "--config", overlay, *limits).trainer
    found = [getattr(trainer, f"limit_{name}_batches") for name in ("val", "test", "train", "predict")]
    assert [repr(limit) for limit in found] == ["1", "1", "1.0", "0.5"]


def test_text_that_is_a_comment_in_yaml_is_no_null(capsys, tmp_path):
    """Of a default, a file and the command line: what GSM8K's answers are marked with, and whatever begins so."""
    assert build("fit", "--config", GRPO).datamodule.answer_marker == "####"
    overlay = tmp_path / "overlay.yaml"
    settings = {
        "data": {"init_args": {"system_prompt": "# Rules\n# Be short", "apply_chat_template": True}},
        "model": {"init_args": {"evaluation": {"answer_pattern": "#### (\\d+)"}}},
    }
    overlay.write_text(yaml.safe_dump(settings))
    with pytest.raises(SystemExit):
        build("fit", "--config", GRPO, "--config", overlay, "--data.answer_marker=##", "--print_config")
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    built = build("fit", "--config", tmp_path / "printed.yaml")
    assert built.datamodule.answer_marker == "##"
    assert built.datamodule.template.system_prompt == "# Rules\n# Be short"
    assert built.model.evaluation.settings.answer_pattern == "#### (\\d+)"
    for null in ("null", "~"):
        assert build("fit", "--config", GRPO, f"--data.answer_marker={null}").datamodule.answer_marker is None


def test_null_reaches_a_setting_inside_train():
    built = build("fit", "--config", SFT, "--model.train.lr_scheduler", "null", "--model.train.optimizer=null")
    assert built.model.train_settings.lr_scheduler is None
    assert built.model.train_settings.optimizer is None


def test_lists_of_configs_are_merged_as_the_quick_start_says(tmp_path):
    """jsonargparse's way: a list takes the place of one of another length; else its items keep settings by place."""
    overlay = tmp_path / "overlay.yaml"

    def directories(names: list[str]) -> list[str | None]:
        overlay.write_text(yaml.safe_dump({"trainer": {"callbacks": names}}))
        trainer = build("fit", "--config", ROOT / "configs" / "demo" / "grpo.yaml", "--config", overlay).trainer
        return [callback.dirpath for callback in trainer.callbacks if isinstance(callback, RolloutSamples)]

    samples, other = "RolloutSamples", "lightning.pytorch.callbacks.LearningRateMonitor"
    assert directories([samples]) == [None]
    assert directories([other, samples, other]) == ["runs/demo/grpo/hf"]  # of the export in its place
    assert directories([samples, other, other]) == ["runs/demo/grpo/samples"]
