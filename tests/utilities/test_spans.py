"""What a process did when: joined, shared out between steps, read once."""

import pickle
import time

import pytest

from lightning_megatron_rl.utilities.spans import Reader, Span, SpanLog


def work(began: float, ended: float, name: str = "sampling", tokens: int = 0) -> Span:
    return Span(name, began, ended, ended - began, tokens)


def test_what_follows_at_once_is_one_span():
    log = SpanLog(join_s=0.25)
    for span in (work(0.0, 1.0, tokens=2), work(1.25, 2.0, tokens=3), work(3.0, 4.0), work(4.0, 5.0, "update")):
        log.add(span)
    first, second, third = log.since(0)[0]
    assert first == Span("sampling", 0.0, 2.0, 1.75, 5)
    assert (second.began, second.ended) == (3.0, 4.0)  # the pause before it was too long
    assert third.name == "update"


def test_without_a_pause_that_joins_every_span_stays_its_own():
    log = SpanLog()
    log.add(work(0.0, 1.0))
    log.add(work(1.0, 2.0))
    assert len(log.since(0)[0]) == 2


def test_a_span_on_an_edge_has_its_share():
    log = SpanLog()
    log.add(work(0.0, 4.0, tokens=8))
    log.add(Span("sampling", 5.0, 9.0, 2.0, 4))  # half of it at work
    log.add(work(9.0, 11.0, "update"))
    assert log.within("sampling", 3.0, 7.0) == (1.0 + 1.0, 2.0 + 2.0)
    assert log.within("update", 0.0, 10.0) == (1.0, 0.0)
    assert log.within("sampling", 20.0, 30.0) == (0.0, 0.0)


def test_a_reader_gets_each_span_once():
    """One that was read does not grow: what comes later would be read by nobody."""
    log = SpanLog(join_s=1.0)
    reader = Reader(log)
    log.add(work(0.0, 1.0))
    (first,) = reader.read()
    log.add(work(1.0, 2.0))
    (second,) = reader.read()
    assert (first.ended, second.began) == (1.0, 1.0)
    assert reader.read() == []
    assert reader.num_lost == 0


def test_a_log_forgets_the_oldest_and_a_reader_knows_how_many():
    log = SpanLog(limit=3)
    reader = Reader(log)
    for number in range(5):
        log.add(work(number, number + 1.0))
    assert [span.began for span in reader.read()] == [2.0, 3.0, 4.0]
    assert reader.num_lost == 2


def test_work_that_fails_took_its_time_too():
    log = SpanLog()
    with pytest.raises(OverflowError), log.during("update"):
        time.sleep(10**10)
    with log.during("sampling") as span:
        span.tokens = 7
    failed, done = log.since(0)[0]
    assert failed.busy == failed.ended - failed.began > 0
    assert done.tokens == 7


def test_spans_of_another_process_are_known_until_it_has_told():
    log = SpanLog(join_s=0.5)
    log.extend([work(0.0, 1.0)], known_until=1.5)
    log.extend([work(1.25, 2.0)], known_until=2.5)
    assert log.known_until == 2.5
    assert log.since(0)[0] == [Span("sampling", 0.0, 2.0, 1.75, 0)]


def test_a_copy_begins_empty():
    log = SpanLog(join_s=0.5, limit=4)
    log.add(work(0.0, 1.0))
    copied = pickle.loads(pickle.dumps(log))
    assert copied.since(0) == ([], 0)
    copied.extend(work(start, start + 1.0) for start in (0.0, 1.4, 3.0))
    assert len(copied.since(0)[0]) == 2
