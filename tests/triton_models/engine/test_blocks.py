import pytest
import torch

from triton_models.engine.blocks import PADDING_BLOCK, BlockManager, KVCache
from triton_models.engine.models import KVShape


def test_blocks_are_handed_out_once_and_never_the_padding() -> None:
    manager = BlockManager(5, 4)
    taken = manager.allocate(5)
    assert sorted(taken) == [1, 2, 3, 4, 5]
    assert PADDING_BLOCK not in taken
    assert (manager.used, len(manager._free)) == (5, 0)
    with pytest.raises(RuntimeError, match="1 KV blocks were requested and 0 are available"):
        manager.allocate(1)


def test_a_block_is_free_when_its_last_holder_lets_go() -> None:
    manager = BlockManager(2, 4)
    blocks = manager.allocate(1)
    manager.retain(blocks)
    manager.release(blocks)
    assert (manager.used, manager.references(blocks[0])) == (1, 1)
    manager.release(blocks)
    assert (manager.used, manager.references(blocks[0])) == (0, 0)


@pytest.mark.parametrize("block", [1, PADDING_BLOCK])
def test_what_is_not_held_can_be_neither_shared_nor_given_back(block: int) -> None:
    manager = BlockManager(2, 4)
    with pytest.raises(RuntimeError, match="not held"):
        manager.release([block])
    with pytest.raises(RuntimeError, match="not held"):
        manager.retain([block])
    with pytest.raises(RuntimeError, match="not held"):
        manager.keep(block)
    assert len(manager._free) == 2


def test_what_is_kept_is_there_until_nothing_else_is_free() -> None:
    manager = BlockManager(3, 4)
    evicted: list[int] = []
    manager.on_eviction = evicted.append
    kept = manager.allocate(2)
    for block in kept:
        manager.keep(block)
    manager.release(kept)
    assert (len(manager._free), len(manager._cached), manager.used, manager.available) == (1, 2, 0, 3)
    other = manager.allocate(1)
    assert not set(other) & set(kept)
    assert evicted == []
    # Of one release, the end goes first.
    assert manager.allocate(1) == [kept[1]]
    assert evicted == [kept[1]]
    manager.retain([kept[0]])
    assert (manager.references(kept[0]), manager.used, manager.available) == (1, 3, 0)


def test_the_first_to_be_released_is_the_first_to_be_evicted() -> None:
    manager = BlockManager(3, 4)
    blocks = manager.allocate(3)
    for block in blocks:
        manager.keep(block)
    for block in blocks:
        manager.release([block])
    manager.retain([blocks[0]])
    manager.release([blocks[0]])
    assert manager.allocate(3) == [blocks[1], blocks[2], blocks[0]]


def test_an_evicted_block_is_not_kept_again() -> None:
    manager = BlockManager(1, 4)
    for _ in range(2):
        blocks = manager.allocate(1)
        manager.keep(blocks[0])
        manager.release(blocks)
    blocks = manager.allocate(1)
    manager.release(blocks)
    assert (len(manager._free), len(manager._cached)) == (1, 0)


@pytest.mark.parametrize("held", [True, False])
def test_what_is_discarded_is_free_as_soon_as_nobody_holds_it(*, held: bool) -> None:
    manager = BlockManager(1, 4)
    blocks = manager.allocate(1)
    manager.keep(blocks[0])
    if held:
        manager.discard(blocks[0])
        manager.release(blocks)
    else:
        manager.release(blocks)
        manager.discard(blocks[0])
    assert (len(manager._free), len(manager._cached)) == (1, 0)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_blocks_for(tokens: int, blocks: int) -> None:
    assert BlockManager(2, 4).blocks_for(tokens) == blocks


def test_copies_are_of_what_the_sources_held_before() -> None:
    shape = KVShape(layers=2, heads=1, head_dim=3)
    cache = KVCache(shape, blocks=4, block_size=2, dtype=torch.float32, device=torch.device("cpu"))
    cache.keys.normal_()
    cache.values.normal_()
    keys, values = cache.keys.clone(), cache.values.clone()
    cache.copy(torch.tensor([1, 1, 2]), torch.tensor([2, 3, 4]))
    assert torch.equal(cache.keys, keys[:, [0, 1, 1, 1, 2]])
    assert torch.equal(cache.values, values[:, [0, 1, 1, 1, 2]])
