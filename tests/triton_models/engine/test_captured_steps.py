import pytest

from triton_models.engine.captured_steps import decode_sizes, prompt_sizes


@pytest.mark.parametrize("largest", [1, 2, 3, 24, 128, 500, 512])
def test_decode_sizes_rise_to_the_largest_and_waste_little(largest: int) -> None:
    sizes = decode_sizes(largest)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == largest
    assert sizes[0] == 1
    for decodes in range(1, largest + 1):
        padded = next(size for size in sizes if size >= decodes)
        assert padded - decodes < max(8, 0.13 * decodes)


@pytest.mark.parametrize("largest", [16, 500, 2048, 8192])
def test_prompt_sizes_stay_within_a_step_and_waste_little(largest: int) -> None:
    sizes = prompt_sizes(largest)
    assert sizes == sorted(set(sizes))
    assert all(size <= min(largest, 2048) for size in sizes)
    for rows in range(64, max(sizes, default=0) + 1):
        padded = next(size for size in sizes if size >= rows)
        assert padded - rows < max(32, 0.13 * rows)
