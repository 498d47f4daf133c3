"""YAML files are refused with file, line, column and what is wrong there."""

from pathlib import Path

import pytest
import yaml

from lightning_megatron_rl.utilities.config_files import check_config, check_configs, check_stages, replaced_settings


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: [1, 2\nb: 3\n", r"line 2, column 2: while parsing a flow sequence expected ',' or '\]'"),
        ("trainer:\n\tmax_steps: 3\n", r"line 2, column 1: .*found character '\\t'"),
        ("a: 'b\n", r"line 2, column 1: .*found unexpected end of stream"),
        ("trainer: *nope\n", r"line 1, column 10: found undefined alias 'nope'"),
        ("", r"config\.yaml is empty"),
        ("# only a comment\n", r"config\.yaml is empty"),
        ("- a\n- b\n", r"line 1, column 1: the file holds a list, not settings"),
        ("trainer\n", r"line 1, column 1: the file holds a single value, not settings"),
        ("a: 1\nb: {c: 1, d: 2, c: 3}\n", r"line 2, column 17: c is given twice, first in line 2"),
        ("a: !!python/object:os.system x\n", r"line 1, column 4: the tag .* is not part of plain YAML"),
        ("a: &x [*x]\n", r"line 1, column 4: an anchor that refers to itself"),
        ("a: 1\n---\nb: 2\n", r"line 2, column 1: expected a single document"),
        ("a: 2026-99-99\n", r"config\.yaml: month must be in 1\.\.12"),
        ("? [a]\n: 1\n", r"line 1, column 3: .*unhashable key"),
        ("a: \x07\n", r"config\.yaml: .*special characters are not allowed"),
        ("train:\nmodel: null\n", r"line 1, column 1: train has no value: indent its settings .*write `train: null`"),
        ("model:\n  init_args:\n    loss: # none\n    a: 1\n", r"line 3, column 5: loss has no value: indent"),
        ("trainer: null\n", r"line 1, column 1: trainer is null: write what belongs there, or leave it out"),
        ("model: {init_args: ~}\n", r"line 1, column 9: init_args is null: write"),
        ("data: {class_path: null}\n", r"line 1, column 8: class_path is null: write"),
        ("a: " + "[" * 5000 + "\n", r"config\.yaml is nested too deep"),
    ],
)
def test_bad_yaml_is_named_with_its_place(tmp_path: Path, content: str, message: str):
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(ValueError, match=message):
        check_config(tmp_path / "config.yaml")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: é\n".encode("utf-16"), "is UTF-16"),
        (b"a: 1\nb: caf\xe9\n", r"line 2: byte 0xe9 at column 7 is not UTF-8"),
        (b"\x1f\x8b\x08\x00", "is gzip-compressed, not text: unpack it with gunzip"),
    ],
)
def test_files_that_are_no_text_are_named(tmp_path: Path, content: bytes, message: str):
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        check_config(tmp_path / "config.yaml")
    with pytest.raises(ValueError, match="is a directory, not a file"):
        check_config(tmp_path)


def test_a_config_that_is_not_there_is_named_with_one_that_is(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("a: 1\n")
    check_configs(["fit", "--config", "mine.yaml", "--config", "{b: 2}", "--model", "other.yaml"], {})
    for arguments in (["--config", "mien.yaml"], ["--config=mien.yaml"], ["-c", "mien.yaml"]):
        with pytest.raises(ValueError, match=r"^--config mien.yaml: there is no such file; did you mean mine.yaml\?$"):
            check_configs(["fit", *arguments], {})
    with pytest.raises(ValueError, match=r"gpro.yaml: .*; did you mean configs/demo/grpo.yaml\?$"):
        check_configs(["fit", "--config", "configs/demo/gpro.yaml"], {})  # of those that come with the package
    with pytest.raises(ValueError, match=f"^PL_FIT__CONFIG x.yml: there is no such file in {tmp_path}$"):
        check_configs(["fit"], {"PL_FIT__CONFIG": "x.yml"})
    with pytest.raises(ValueError, match=r"/x.yml: there is no such file$"):
        check_configs(["fit", "--config", str(tmp_path / "none" / "x.yml")], {})


def test_good_yaml_passes(tmp_path: Path):
    content = "base: &b {x: 1}\na: {<<: *b, y: 1.0e-3}\nc: [*b, null]\nd: null\ne: ''\nf: ~\n"
    (tmp_path / "config.yaml").write_text(content)
    check_config(tmp_path / "config.yaml")


def test_what_an_overlay_loses_of_free_settings_is_named(tmp_path: Path):
    """One spells `init_args` out; settings of ours are merged, and lists and other values are not free settings."""
    train = "train: {model_config: {layernorm_epsilon: 1.0e-5, qk_clip: true}, recompute: full}"
    (tmp_path / "a.yaml").write_text(f"model:\n  class_path: X\n  init_args:\n    {train}\n    rewards: [{{a: 1}}]\n")
    (tmp_path / "b.yaml").write_text("model: {train: {model_config: {qk_clip: false, a: b}, lora: null}}\n")
    (tmp_path / "c.yaml").write_text("model: {rewards: [], train: {logprob_chunk_size: 8}}\n")

    def told(*names: str) -> list[str]:
        paths = (str(tmp_path / f"{name}.yaml") for name in names)
        return replaced_settings(["fit", *(word for path in paths for word in ("--config", path))])

    assert told("a") == told("a", "c") == told("a", "a") == []
    (one,) = told("a", "c", "b")
    a, b = tmp_path / "a.yaml", tmp_path / "b.yaml"
    assert one.startswith(f"model.train.model_config of {b} replaces that of {a}, and layernorm_epsilon with it.")
    assert one.endswith("--model.train.model_config.NAME VALUE adds to it")
    assert len(told("a", "b", "a")) == 2


def test_every_way_to_name_a_file_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    bad = tmp_path / "bad.yaml"
    bad.write_text("a: [")
    for arguments in (["--config", str(bad)], [f"--config={bad}"], ["-c", "~/bad.yaml"], ["--model", str(bad)]):
        with pytest.raises(ValueError, match=r"bad\.yaml, line 1"):
            check_configs(["fit", *arguments], {})
    with pytest.raises(ValueError, match=r"bad\.yaml, line 1"):
        check_configs(["fit"], {"PL_FIT__CONFIG": str(bad)})
    with pytest.raises(ValueError, match="is a directory"):
        check_configs(["fit", "--config", str(tmp_path)], {})
    check_configs(["fit", "--config", "{a: 1}", "--trainer.max_steps", "3"], {"PL_FIT__CONFIG": "nowhere"})


STAGE = """
trainer:
  callbacks:
    - class_path: lightning.pytorch.callbacks.LearningRateMonitor
      init_args: {dirpath: DIRECTORY/logs}
    - class_path: HFExport
      init_args: {dirpath: DIRECTORY/sft/hf}
"""


@pytest.mark.parametrize("name", ["sft", "calculator_sft"])
def test_a_model_that_an_example_makes_is_named_with_the_command_in_the_config(tmp_path, monkeypatch, name):
    config = Path(__file__).parents[2] / "configs" / "demo" / f"{name}.yaml"
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"runs/\w+/model is not there\. Make it first, in a clone") as refused:
        check_stages(yaml.safe_load(config.read_text()), ["fit", "--config", str(config)], {})
    command = str(refused.value).partition("repository: python ")[2]
    assert command
    assert command in config.read_text()
    assert (config.parents[2] / command.split()[0]).is_file()
    Path(command.split()[1]).mkdir(parents=True)
    check_stages(yaml.safe_load(config.read_text()), ["fit", "--config", str(config)], {})


def test_a_stage_that_has_not_run_is_named(tmp_path: Path):
    first, second, broken = (tmp_path / name for name in ("sft.yaml", "grpo.yaml", "notes.yaml"))
    first.write_text(STAGE.replace("DIRECTORY", str(tmp_path)))
    broken.write_text("[")
    made = tmp_path / "sft" / "hf" / "last"
    settings = {"model": {"init_args": {"model": str(made)}}, "data": {"init_args": {"tokenizer": "org/name"}}}
    second.write_text("model: {}")
    arguments = ["fit", "--config", str(second)]
    with pytest.raises(ValueError, match=rf"{made} is not there. {first} writes it, and that stage has not run"):
        check_stages(settings, arguments, {})
    with pytest.raises(ValueError, match=rf"Run it first: lightning-megatron-rl fit --config {first}"):
        check_stages({"tokenizer": str(made)}, [], {"PL_FIT__CONFIG": str(second)})
    made.with_name("last.failed").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"that stage's export failed: .*last\.failed"):
        check_stages(settings, arguments, {})
    check_stages({"dirpath": str(made), "model": str(tmp_path / "other" / "hf")}, arguments, {})
    check_stages(settings, ["fit", "--config", str(first)], {})  # its own output
    made.mkdir()
    check_stages(settings, arguments, {})
