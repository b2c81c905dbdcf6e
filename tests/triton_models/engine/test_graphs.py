import pytest

from triton_models.engine.graphs import graph_sizes


@pytest.mark.parametrize("largest", [1, 2, 3, 24, 128, 500, 512])
def test_sizes_rise_to_the_largest_and_waste_little(largest: int) -> None:
    sizes = graph_sizes(largest)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == largest
    assert sizes[0] == 1
    for decodes in range(1, largest + 1):
        padded = next(size for size in sizes if size >= decodes)
        assert padded - decodes < max(8, 0.13 * decodes)
