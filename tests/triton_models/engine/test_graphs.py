import pytest
import torch
from torch import Tensor

from tests.triton_models.engine.uncaptured import do_again
from triton_models.engine.graphs import CapturedSteps, DeviceStep, decode_sizes, prompt_sizes
from triton_models.engine.models import StepLayout
from triton_models.engine.slots import SlotTable


@pytest.mark.parametrize("largest", [1, 2, 3, 24, 128, 500, 512])
def test_decode_sizes_rise_to_the_largest_and_waste_little(largest: int) -> None:
    sizes = decode_sizes(largest)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == largest
    assert sizes[0] == 1
    for decodes in range(1, largest + 1):
        padded = next(size for size in sizes if size >= decodes)
        assert padded - decodes < max(8, 0.13 * decodes)


@pytest.mark.parametrize("largest", [16, 500, 2048, 4096, 8192])
def test_prompt_sizes_stay_within_a_step_and_waste_little(largest: int) -> None:
    sizes = prompt_sizes(largest)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == min(largest, 4096), "a full step is captured, too"
    for rows in range(1, sizes[-1] + 1):
        padded = next(size for size in sizes if size >= rows)
        assert padded - rows < max(16, 0.0625 * rows)


SPARE = 6


def sum_of(rows: int, chunks: int) -> int:
    return rows + chunks


class Seen(DeviceStep):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.slots = SlotTable(SPARE, 4, torch.device("cpu"))
        self.longest = 64
        self.layouts: list[StepLayout] = []

    def decode(self, slots: Tensor, longest: int) -> Tensor:
        return torch.zeros(len(slots), 1)

    def finish(self, slots: Tensor, logits: Tensor) -> Tensor:
        return torch.zeros(3, len(slots))

    def forward(self, tokens: Tensor, layout: StepLayout) -> Tensor:
        self.layouts.append(layout)
        return tokens[:, None].float()


def inputs(*, decodes: int, chunk: int, size: int) -> tuple[Tensor, StepLayout]:
    """A step of some decodes and one chunk in a tile for each token, filled up to a captured size."""
    real = decodes + chunk
    padding = size - real
    layout = StepLayout(
        tables=torch.empty(0),
        slots=torch.tensor([1] * real + [SPARE] * padding, dtype=torch.int32),
        positions=torch.tensor([5] * real + [-1] * padding),
        decode_lengths=torch.full((decodes,), 6, dtype=torch.int32),
        longest_decode=6,
        tiles=torch.full((chunk, 4), 3, dtype=torch.int32),
    )
    return torch.tensor([9] * real + [0] * padding), layout


def test_a_captured_step_sees_nothing_of_the_one_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    do_again(monkeypatch)
    step = Seen()
    captured = CapturedSteps(step, largest=96, most_tiles=sum_of)
    captured.capture()
    step.layouts.clear()
    captured.forward(*inputs(decodes=5, chunk=80, size=96))
    hidden = captured.forward(*inputs(decodes=2, chunk=20, size=32))
    assert hidden[:, 0].tolist() == [9] * 22 + [0] * 10
    before, layout = step.layouts
    assert (before.decode_lengths.data_ptr(), len(before.slots)) == (layout.decode_lengths.data_ptr(), 96)
    assert layout.decode_lengths.tolist() == [6, 6] + [0] * (SPARE - 2)
    assert layout.slots.tolist() == [1] * 22 + [SPARE] * 10
    assert layout.positions.tolist() == [5] * 22 + [-1] * 10
    assert layout.tiles is not None
    assert layout.tiles.sum(1).tolist() == [12] * 20 + [0] * (len(layout.tiles) - 20)
