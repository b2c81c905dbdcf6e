import pytest

from triton_models.engine.block_manager import PADDING_BLOCK, BlockManager


def test_blocks_are_handed_out_once_and_never_the_padding() -> None:
    manager = BlockManager(5, 4)
    taken = manager.allocate(5)
    assert sorted(taken) == [1, 2, 3, 4, 5]
    assert PADDING_BLOCK not in taken
    assert (manager.used, manager.free) == (5, 0)
    with pytest.raises(RuntimeError, match="1 KV blocks were asked for and 0 are free"):
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
    assert manager.free == 2


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_blocks_for(tokens: int, blocks: int) -> None:
    assert BlockManager(2, 4).blocks_for(tokens) == blocks
