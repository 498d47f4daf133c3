import pytest

from lightning_megatron_rl.data.loader import EvaluationLoader, GlobalBatches, ResumableLoader


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
