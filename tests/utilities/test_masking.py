"""Secrets do not get into what is written down."""

import pytest
import yaml

from lightning_megatron_rl.rollout.vllm.engine import VLLMEngine
from lightning_megatron_rl.utilities.masking import MASK, is_secret_name, mask_secrets, mask_text, unmasked_environment
from tests.command_line import ROOT, build, changed

GRPO = ROOT / "configs" / "demo" / "grpo.yaml"
ENV = "model.init_args.engine.init_args.env"


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID",
        "AWS_SESSION_TOKEN", "OPENAI_KEY", "DB_PASSWORD", "PGPASSWORD_FILE_PASSWD", "apiKey", "api-key", "secret",
        "Authorization", "MY_CREDENTIALS", "SSH_PRIVATE_KEY", "accessToken", "GIT_AUTH", "DB_PASS", "SENTRY_DSN",
    ],
)  # fmt: skip
def test_names_of_secrets(name):
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "max_tokens", "tokenizer", "max_tokens_per_microbatch", "eos_token", "pad_token_id", "token_ids",
        "prompt_token_id", "TOKENIZERS_PARALLELISM",
        "add_special_tokens", "answer_key", "monitor", "OMP_NUM_THREADS", "VLLM_LOGGING_LEVEL", "PATH", "author",
        "bypass", "SSH_AUTH_SOCK", "KEYBOARD", "token_file", "RAY_AUTH_TOKEN_PATH", "token_variable",
        "moe_token_dispatcher_type", "moe_token_drop_policy", "num_experts_per_token", "long_prefill_token_threshold",
    ],
)  # fmt: skip
def test_names_of_other_things(name):
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("hf_abcdefghijklmnopqrst", MASK),
        ("sk-proj-0123456789abcdefghij", MASK),
        ("ghp_0123456789abcdefghij0123", MASK),
        ("AKIAABCDEFGHIJKLMNOP", MASK),
        ("Bearer abcdefgh.ijkl", MASK),
        ("http://user:hunter2@proxy:3128", f"http://user:{MASK}@proxy:3128"),
        ("http://proxy:3128", "http://proxy:3128"),
        ("WARNING", "WARNING"),
    ],
)
def test_values_that_look_like_secrets(value, expected):
    assert mask_secrets({"SOMETHING": [value]}) == {"SOMETHING": [expected]}
    assert mask_text(f"got {value}") == f"got {expected}"


def test_nested_settings_and_messages():
    settings = {"env": {"HF_TOKEN": "abc", "OMP_NUM_THREADS": "1"}, "api_key": ["a", "b"], "lr": 1.0, "secret": None}
    assert mask_secrets(settings) == {
        "env": {"HF_TOKEN": MASK, "OMP_NUM_THREADS": "1"}, "api_key": [MASK, MASK], "lr": 1.0, "secret": None,
    }  # fmt: skip
    assert settings["env"]["HF_TOKEN"] == "abc"
    assert mask_text("expected int, got {'HF_TOKEN': 'abc', 'A': 'b'} password=hunter2") == (
        f"expected int, got {{'HF_TOKEN': '{MASK}', 'A': 'b'}} password={MASK}"
    )
    assert mask_text("module: HF_TOKEN=abc, a=b") == f"module: HF_TOKEN={MASK}, a=b"  # a name before the secret's


def test_written_configs_hold_no_secret_and_the_run_has_it(tmp_path, capsys):
    """config.yaml is what `Parser.save` writes, by way of `dump`; `--print_config` prints the same."""
    secrets = {"HF_TOKEN": "very-private", "PROXY": "http://me:hunter2@proxy", "OMP_NUM_THREADS": "2"}
    config = changed(GRPO, tmp_path / "config.yaml", ENV, secrets)
    built = build("fit", "--config", config)
    assert built.model.engine.env == secrets
    saved = tmp_path / "saved.yaml"
    built._parser("fit").save(built.config["fit"], saved, skip_none=False, overwrite=True)
    with pytest.raises(SystemExit):
        build("fit", "--config", config, "--print_config")
    for text in (saved.read_text(), capsys.readouterr().out):
        assert "very-private" not in text
        assert "hunter2" not in text
        env = yaml.safe_load(text)["model"]["init_args"]["engine"]["init_args"]["env"]
        assert env == {"HF_TOKEN": MASK, "PROXY": f"http://me:{MASK}@proxy", "OMP_NUM_THREADS": "2"}


def test_a_written_config_keeps_the_names_of_variables_and_of_dispatchers(tmp_path, capsys):
    """Both were masked as secrets, so that no run could be started with the config that another had written."""
    judge = {"class_path": "lightning_megatron_rl.rewards.HTTPReward", "init_args": {"url": "http://judge:8000"}}
    judge["init_args"]["token_variable"] = "JUDGE_TOKEN"
    config = changed(GRPO, tmp_path / "config.yaml", "model.init_args.rewards", [judge])
    arguments = ("--config", config, "--model.train.model_config", "{moe_token_dispatcher_type: alltoall}")
    with pytest.raises(SystemExit):
        build("fit", *arguments, "--print_config")
    (tmp_path / "written.yaml").write_text(capsys.readouterr().out)
    built = build("fit", "--config", tmp_path / "written.yaml").model
    assert built.rewards[0].token_variable == "JUDGE_TOKEN"
    assert built.train_settings.model_config == {"moe_token_dispatcher_type": "alltoall"}


def test_a_masked_value_comes_from_the_environment_or_is_refused(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "from here")
    assert unmasked_environment({"HF_TOKEN": MASK, "A": "b"}) == {"HF_TOKEN": "from here", "A": "b"}
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(ValueError, match=r"the value of HF_TOKEN was masked .*set HF_TOKEN in the environment"):
        VLLMEngine(env={"HF_TOKEN": MASK})


def test_a_message_about_a_wrong_setting_shows_no_secret(tmp_path, capsys):
    config = changed(GRPO, tmp_path / "config.yaml", ENV, {"HF_TOKEN": "very-private", "OTHER": [1]})
    with pytest.raises(SystemExit):
        build("fit", "--config", config)
    assert "very-private" not in capsys.readouterr().err
