"""Samples of the report: which are there, what is left out, and what a token's text is."""

import json

import pytest

from lightning_megatron_rl.report.command import write_report
from lightning_megatron_rl.report.embedding import embed
from lightning_megatron_rl.report.run import read_run
from lightning_megatron_rl.report.samples import cut_tokens, find_tokenizer, read_samples, show_samples, spread
from tests.report.runs import RUN_ID, sample, write_config, write_run, write_samples
from tests.tiny_models import make_tokenizer


def embedded(page: str) -> list[dict]:
    data = page.partition('<script type="application/json" id="data">')[2].partition("</script>")[0]
    return json.loads(data)["samples"]


def test_samples_have_their_tokens_and_logprobs(tmp_path):
    run = write_run(tmp_path / "run")
    write_samples(run, {1: [sample("12", 1.0)], 2: [sample("345", cut=True)]})
    one, two = embedded(write_report([run]).read_text())
    assert one["pieces"] == ["1", "2"]
    assert one["logprobs"] == [0.0, -0.1]
    assert "response" not in one  # the page puts it together
    assert (one["step"], one["reward"], one["finish"]) == (1, 1.0, "stop")
    assert (two["step"], two["pieces"], two["finish"]) == (2, ["3", "4", "5"], "length")


def test_without_a_tokenizer_tokens_are_numbers_and_that_is_said(tmp_path):
    run = write_run(tmp_path / "run")
    write_samples(run, {1: [sample("12")]})
    for file in run.rglob("tokenizer.json"):
        file.unlink()
    text = write_report([run]).read_text()
    assert "tokens are shown by their numbers" in text
    (only,) = embedded(text)
    assert only["response"] == "12"
    assert all(piece.strip("[]").isdigit() for piece in only["pieces"])


def test_a_character_of_several_tokens_belongs_to_the_last():
    from tokenizers import Tokenizer, decoders, models

    letters = {chr(0x100 + byte) if byte < 33 else chr(byte): byte for byte in range(127)}
    vocabulary = {**letters, "â": 200, "Ĥ": 201, "¬": 202}  # the three bytes of € as byte-level BPE writes them
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    assert cut_tokens([ord("a"), 200, 201, 202, ord("b")], tokenizer) == ["a", "", "", "€", "b"]
    assert cut_tokens([5, 6], None) == ["[5]", "[6]"]


def test_files_of_other_runs_are_not_read(tmp_path):
    run = write_run(tmp_path / "run")
    mine = write_samples(run, {1: [sample("12")]})
    other = mine.with_name("rollouts-dp0-2.jsonl")
    other.write_text(mine.read_text().replace(RUN_ID, "ba9876543210"))
    mine.with_name("rollouts-dp0-superseded.jsonl").write_text(mine.read_text())
    training, validation = read_samples(read_run(run))
    assert (training.num_written, validation.num_written) == (1, 0)


@pytest.mark.parametrize("place", ["elsewhere", "else where", "ailleurs é", "~/else where", f"{'long ' * 30}name"])
def test_samples_are_found_where_the_config_puts_them(tmp_path, monkeypatch, place):
    """However YAML writes that: with quotes, escapes or in two lines."""
    monkeypatch.setenv("HOME", str(tmp_path))
    run = write_run(tmp_path / "run")
    file = write_samples(tmp_path / place.removeprefix("~/"), {1: [sample("12")]})
    named = place if place.startswith("~") else str(tmp_path / place)
    callbacks = [{"class_path": "RolloutSamples", "init_args": {"dirpath": f"{named}/{file.parent.name}"}}]
    write_config(run, {"trainer": {"callbacks": callbacks}})
    assert read_samples(read_run(run))[0].num_written == 1


@pytest.mark.parametrize(
    "tail", ["{", '{"step": 2, "run"', '{"step": 2}\n', '{"step": 2, "reward": null}\n', "\n\0\0\n"]
)
def test_lines_that_were_cut_short_are_left_out_and_counted(tmp_path, tail):
    run = write_run(tmp_path / "run")
    file = write_samples(run, {1: [sample("12")]})
    file.write_text(file.read_text() + tail)
    training, _ = read_samples(read_run(run))
    assert [record["step"] for record in training.records] == [1]
    assert "training samples cannot be read" in training.notes[0]


def test_rewards_that_are_no_numbers_do_not_break_the_page(tmp_path):
    run = write_run(tmp_path / "run")
    write_samples(run, {1: [sample("12", float("nan")), sample("1", float("inf")), sample("1", 1.0)]})
    assert [row["reward"] for row in embedded(write_report([run]).read_text())] == [None, None, 1.0]


def test_steps_are_spread_and_each_has_its_first_sample_before_any_has_its_second(tmp_path):
    assert spread(range(1, 101), 4) == [1, 34, 67, 100]
    run = write_run(tmp_path / "run")
    write_samples(run, {step: [sample("1"), sample("2")] for step in range(1, 101)})
    training, _ = read_samples(read_run(run))
    assert len(training.steps) == 60
    assert training.steps[0] == 1
    assert training.steps[-1] == 100
    rows, notes = show_samples(training, 0, find_tokenizer(read_run(run)), 30 * len(embed({"step": 1})) * 10)
    assert 0 < len(rows) < 60
    assert len({row["step"] for row in rows}) == len(rows)
    assert f"{len(rows)} of 200 training samples are here" in notes[0]


@pytest.mark.slow
def test_samples_of_32k_tokens_stay_below_30_mb_and_say_what_is_left_out(tmp_path):
    """Characters that JSON in a page writes with six are the worst; all of them are kept in the file of samples."""
    run = write_run(tmp_path / "run")
    long = sample("<" * 32_768)
    write_samples(run, {step: [long] * 8 for step in range(1, 41)})
    file = write_report([run])
    assert file.stat().st_size < 30_000_000
    text = file.read_text()
    rows = embedded(text)
    assert rows
    assert all(len(row["pieces"]) == 4_096 == len(row["logprobs"]) for row in rows)
    assert rows[0]["cut"] == [3_072, 31_744]
    assert f"{len(rows):,} of 320 training samples are here" in text
    assert "the first 3,072 and the last 1,024 tokens are here" in text


def test_the_tokenizer_is_that_of_the_samples(tmp_path):
    """With one that decodes to something else the response is there as it was written, too."""
    run = write_run(tmp_path / "run")
    file = write_samples(run, {1: [sample("12")]})
    file.write_text(file.read_text().replace('"response": "12"', '"response": "other"'))
    (row,) = embedded(write_report([run]).read_text())
    assert row["response"] == "other"
    assert make_tokenizer().decode(json.loads(file.read_text())["response_ids"]) == "12"
