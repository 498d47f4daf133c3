"""Form, patterns, JSON and length, and patterns that take for ever on what a policy writes."""

import json
import time
from pathlib import Path

import pytest

from lightning_megatron_rl.rewards import (
    FormatReward,
    JSONSchemaReward,
    LengthPenalty,
    PatternAnswer,
    RewardSetupError,
    text_rewards,
)
from lightning_megatron_rl.rewards.limited_child import LimitedChild
from tests.notices import silent, told
from tests.rewards.samples import make_sample

BACKTRACKING = "(a+)+b"  # on n letters a: 2^n steps
ENDLESS = "a" * 60


@pytest.fixture
def short_limit(monkeypatch):
    """A child of this test's own, with less patience than the 5 s of the shared one."""
    child = LimitedChild(text_rewards.WORKER, cpu_seconds=0.5)
    monkeypatch.setattr(text_rewards, "text_child", lambda: child)
    yield child
    child.close()


def test_format_matches_the_whole_response():
    samples = [make_sample(text) for text in ("<a>1</a>", "<a>1</a>\n", "x<a>1</a>", "<a>1\n2</a>", "")]
    assert FormatReward("<a>.*</a>")(samples) == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert FormatReward("(?s)<a>.*</a>")(samples) == [1.0, 0.0, 0.0, 1.0, 0.0]


def test_bad_pattern_is_refused_at_once():
    with pytest.raises(ValueError, match=r"the pattern '\(a' of the reward 'format' is no regular expression"):
        FormatReward("(a")


def test_pattern_that_takes_for_ever_costs_its_sample_alone(short_limit):
    """In this process it could not even be interrupted: `re` holds the interpreter's lock."""
    samples = [make_sample("aab"), make_sample(ENDLESS, index=9), make_sample("ab")]
    started = time.monotonic()
    with told(r"'format' on the sample of prompt 9 .* more than 0.5 s of CPU time: 0"):
        assert FormatReward(BACKTRACKING)(samples) == [1.0, 0.0, 1.0]
    assert time.monotonic() - started < 30  # 0.5 s of CPU time on a busy machine


def test_pattern_answer():
    reward = PatternAnswer(r"<answer>(.*?)</answer>")
    responses = ["<answer> 7 </answer>", "<answer>8</answer> no, <answer>7</answer>", "7", "<answer>7</answer> 8", ""]
    assert reward([make_sample(text, "7") for text in responses]) == [1.0, 1.0, 0.0, 1.0, 0.0]
    assert PatternAnswer(r"\d+")([make_sample("first 3 then 4", "4")]) == [1.0]
    assert PatternAnswer("(Oslo)|rest", ignore_case=True)([make_sample("Oslo", "oslo"), make_sample("rest", "x")]) == [
        1.0,
        0.0,
    ]
    with pytest.raises(ValueError, match="has 2 groups"):
        PatternAnswer("(a)(b)")
    with pytest.raises(ValueError, match=r"needs the answer.*prompt 4"):
        reward([make_sample("7", None, index=4)])


CITY = {"type": "object", "required": ["city"], "properties": {"city": {"type": "string", "pattern": "^[A-Z]"}}}


def test_json_schema(tmp_path: Path):
    responses = {
        '{"city": "Oslo"}': 1.0,
        ' {"city": "Oslo", "more": [1]}\n': 1.0,
        '{"city": "oslo"}': 0.0,
        '{"town": "Oslo"}': 0.0,
        '["Oslo"]': 0.0,
        'The city is {"city": "Oslo"}': 0.0,
        "{city: Oslo}": 0.0,
        "": 0.0,
        "[" * 100_000: 0.0,
        '{"city": NaN}': 0.0,
    }
    samples = [make_sample(text) for text in responses]
    assert JSONSchemaReward(CITY)(samples) == list(responses.values())
    (tmp_path / "city.json").write_text(json.dumps(CITY))
    assert JSONSchemaReward(str(tmp_path / "city.json"))(samples) == list(responses.values())


def test_schema_with_a_pattern_that_takes_for_ever(short_limit):
    reward = JSONSchemaReward({"type": "string", "pattern": "^" + BACKTRACKING})
    with told("CPU time: 0"):
        assert reward([make_sample(f'"{ENDLESS}"'), make_sample('"ab"')]) == [0.0, 1.0]


def test_bad_schemas_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="'json_schema' is no JSON Schema: 'objekt' is not valid"):
        JSONSchemaReward({"type": "objekt"})
    with pytest.raises(ValueError, match=r"cannot be read: .*no such file"):
        JSONSchemaReward(str(tmp_path / "nothing.json"))
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ValueError, match=r"cannot be read: .*Expecting"):
        JSONSchemaReward(str(tmp_path / "bad.json"))


def test_an_error_of_a_text_is_not_one_of_the_schema():
    with told("ended with code 1: 0"):
        assert JSONSchemaReward({"multipleOf": 0.5})([make_sample(f"1{'0' * 400}"), make_sample("2")]) == [0.0, 1.0]


@pytest.mark.parametrize("missing", ["#/$defs/city", "other.json"])
def test_a_schema_that_names_what_is_not_there_ends_the_run(missing: str):
    """Each response to which it is applied would be wrong."""
    reward = JSONSchemaReward({"type": "object", "properties": {"city": {"$ref": missing}}})
    assert reward([make_sample("[]"), make_sample("{}")]) == [0.0, 1.0]
    with pytest.raises(RewardSetupError, match=rf"the schema of the reward 'json_schema' names .*{missing[-4:]}.*defs"):
        reward([make_sample('{"city": 1}')])


def test_length_penalty():
    lengths = (0, 100, 125, 150, 200, 300)
    samples = [make_sample("x" * size) for size in lengths]
    assert LengthPenalty(100, 200)(samples) == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    for free, most in ((200, 200), (-1, 5), (5, 4)):
        with pytest.raises(ValueError, match=f"free_tokens={free}"):
            LengthPenalty(free, most)


def test_interrupted_request_leaves_no_answer_for_the_next(short_limit, monkeypatch):
    """The guard's interrupt may come between a request and its answer: not to be taken for the next one's."""
    assert short_limit.ask(["fullmatch", "a", "a"])
    child = short_limit._child

    def interrupted(seconds: float) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(child, "read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        short_limit.ask(["fullmatch", "a", "a"])
    with silent():
        assert short_limit.ask(["fullmatch", "a", "b"]) is False
    assert child.process.returncode is not None
