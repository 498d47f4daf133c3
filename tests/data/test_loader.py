import pytest

from lightning_megatron_rl.data.loader import EvaluationLoader, GlobalBatches, ResumableLoader, TokenBudgetBatches


def of_all_ranks(num_replicas: int, num_rows: int = 50, batch_size: int = 12, **kwargs) -> list[GlobalBatches]:
    return [
        GlobalBatches(num_rows, batch_size, num_replicas=num_replicas, rank=rank, **kwargs)
        for rank in range(num_replicas)
    ]


def test_union_over_ranks_is_the_same_batch_for_every_data_parallel_size():
    def global_batches(num_replicas: int) -> list[list[int]]:
        ranks = of_all_ranks(num_replicas, shuffle=True, seed=3, drop_last=True)
        parts = [[batches[number] for batches in ranks] for number in range(12)]  # three epochs
        assert all(len(rows) == 12 // num_replicas for part in parts for rows in part)
        return [sorted(row for rows in part for row in rows) for part in parts]

    reference = global_batches(1)
    for epoch in range(3):
        rows = [row for batch in reference[4 * epoch : 4 * epoch + 4] for row in batch]
        assert len(set(rows)) == len(rows) == 48  # nothing twice in an epoch
    for num_replicas in (2, 3, 4, 6, 12):
        assert global_batches(num_replicas) == reference


def test_epochs_and_seeds_differ_and_repeat():
    batches = GlobalBatches(50, 10, shuffle=True, seed=0)
    first_epoch = [batches[number] for number in range(5)]
    assert [batches[number] for number in range(5, 10)] != first_epoch
    assert [batches[number] for number in range(5)] == first_epoch
    assert GlobalBatches(50, 10, shuffle=True, seed=7)[0] != first_epoch[0]


@pytest.mark.parametrize("num_rows", [1, 5, 11, 12, 13, 50])
@pytest.mark.parametrize("num_replicas", [1, 2, 4, 7])
def test_evaluation_gives_every_row_once_in_equally_many_batches(num_rows: int, num_replicas: int):
    loaders = [EvaluationLoader(range(num_rows), batches) for batches in of_all_ranks(num_replicas, num_rows)]
    for _ in range(2):  # each iteration starts at the first batch
        assert sorted(row for loader in loaders for rows in loader for row in rows) == list(range(num_rows))
    assert {len(list(loader)) for loader in loaders} == {len(loaders[0])} == {-(-num_rows // 12)}


def make_loader(num_replicas: int = 1, rank: int = 0, **changes) -> ResumableLoader[int]:
    settings = {"num_rows": 22, "batch_size": 4, "shuffle": True, "seed": 1, "drop_last": True} | changes
    return ResumableLoader(range(settings["num_rows"]), GlobalBatches(**settings, num_replicas=num_replicas, rank=rank))


def take(loader: ResumableLoader[int], number: int) -> list[list[int]]:
    taken: list[list[int]] = []
    while len(taken) < number:
        # the range comes first: zip must not take a batch that it then throws away
        taken += [batch for _, batch in zip(range(min(len(loader), number - len(taken))), loader, strict=False)]
    return taken


@pytest.mark.parametrize("num_done", range(12))
def test_restored_loader_goes_on_with_the_next_batch(num_done: int):
    reference = take(make_loader(), 20)
    loader = make_loader()
    assert take(loader, num_done) == reference[:num_done]
    restored = make_loader()
    restored.load_state_dict(loader.state_dict())
    assert restored.state_dict() == loader.state_dict()  # a save before the next batch loses nothing
    assert len(restored) == 5
    assert take(restored, 20 - num_done) == reference[num_done:]


def test_state_of_one_data_parallel_size_serves_another():
    loader = make_loader(num_replicas=2, rank=1)
    take(loader, 7)
    restored = make_loader()
    restored.load_state_dict(loader.state_dict())
    assert take(restored, 1) == [take(make_loader(), 8)[7]]


def test_changed_data_cannot_go_on_within_an_epoch_but_can_after_it():
    loader = make_loader()
    take(loader, 6)
    changed = make_loader(batch_size=2, seed=9)
    with pytest.raises(ValueError, match=r"after 1 of 5 batches of epoch 1.*batch_size was 4, is 2; seed was 1, is 9"):
        changed.load_state_dict(loader.state_dict())
    take(loader, 4)
    changed.load_state_dict(loader.state_dict())
    assert changed.state_dict()["num_done"] == 2 * 11  # the start of epoch 2


LENGTHS = [3, 3, 4, 2, 9, 1, 1, 1, 5, 5, 1, 2]


def test_token_budget_fills_batches_in_order():
    batches = TokenBudgetBatches(LENGTHS, max_tokens=9, batch_size=3)
    rows = [batches[number] for number in range(7)]
    assert rows == [[0, 1], [2, 3], [4], [5, 6, 7], [8], [9, 10, 11], [0, 1]]  # and so on from the first
    assert batches.per_epoch == 6


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_token_budget_gives_every_row_once_an_epoch_and_the_same_batches_on_any_number_of_ranks(num_replicas: int):
    def epochs(num_replicas: int) -> list[list[list[int]]]:
        ranks = [
            TokenBudgetBatches(LENGTHS, 10, 8, num_replicas=num_replicas, rank=rank, shuffle=True, seed=5)
            for rank in range(num_replicas)
        ]
        count = ranks[0].per_epoch
        return [
            [sorted(row for rank in ranks for row in rank[epoch * count + number]) for number in range(count)]
            for epoch in range(3)
        ]

    found = epochs(num_replicas)
    assert found == epochs(1)
    assert found[0] != found[1] != found[2]
    for batches in found:
        assert sorted(row for batch in batches for row in batch) == list(range(len(LENGTHS)))
        assert all(sum(LENGTHS[row] for row in batch) <= 10 for batch in batches)


def test_token_budget_resumes_and_refuses_another_budget_within_an_epoch():
    def loader(budget: int) -> ResumableLoader[int]:
        return ResumableLoader(range(12), TokenBudgetBatches(LENGTHS, budget, 8, shuffle=True))

    started = loader(10)
    reference = take(loader(10), 12)
    assert take(started, 3) == reference[:3]
    restored = loader(10)
    restored.load_state_dict(started.state_dict())
    assert take(restored, 9) == reference[3:]
    with pytest.raises(ValueError, match="max_tokens_per_batch was 10, is 12"):
        loader(12).load_state_dict(started.state_dict())


def test_token_budget_of_rows_of_other_lengths_cannot_go_on_within_an_epoch():
    """As many rows, encoded otherwise: its batches are others, so that rows would come twice, and others never."""

    def loader(lengths: list[int]) -> ResumableLoader[int]:
        return ResumableLoader(range(12), TokenBudgetBatches(lengths, 10, 8, shuffle=True))

    others = [min(length, 4) for length in LENGTHS]
    started = loader(list(LENGTHS))
    seen = take(started, 3)
    rest = loader(others)
    state = {name: value for name, value in started.state_dict().items() if name != "lengths"}
    rest.load_state_dict(state)  # of a checkpoint that does not have them
    whole = [row for batch in seen + take(rest, len(rest) - 3) for row in batch]
    assert sorted(whole) != list(range(12))
    with pytest.raises(ValueError, match=r"the rows have other numbers of tokens.*cannot go on where it stopped"):
        loader(others).load_state_dict(started.state_dict())
    take(started, len(started) - 3)
    ended = loader(others)
    ended.load_state_dict(started.state_dict())
    assert ended.state_dict()["num_done"] == len(ended)


def test_token_budget_smaller_than_a_row_is_refused():
    with pytest.raises(ValueError, match="longest sequence has 9 tokens, max_tokens_per_batch is 8: raise"):
        TokenBudgetBatches(LENGTHS, max_tokens=8, batch_size=4)


@pytest.mark.parametrize(("before", "after"), [(2, 0), (0, 2), (1, 3)])
def test_an_epoch_keeps_what_it_reads_ahead(before: int, after: int):
    """A checkpoint within it, resumed with another `read_ahead`: no row twice, none left out, and then the new one."""

    def batches(ahead: int) -> GlobalBatches:
        return GlobalBatches(12, 2, shuffle=True, seed=5, drop_last=True, read_ahead=ahead)

    loader = ResumableLoader(list(range(12)), batches(before))
    first = take(loader, 2)
    restored = ResumableLoader(list(range(12)), batches(after))
    restored.load_state_dict(loader.state_dict())
    assert restored.state_dict() == loader.state_dict()
    rest = take(restored, 4)
    assert sorted(row for batch in first + rest for row in batch) == list(range(12))
    assert [len(batch) for batch in take(restored, 6)] == [2 * (1 + after), *[2] * (5 - after), *[0] * after]
    again = ResumableLoader(list(range(12)), batches(before))
    again.load_state_dict(restored.state_dict())
    assert again.state_dict()["read_ahead"] == 0
