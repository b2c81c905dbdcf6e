import pytest
import torch
from torch import Tensor

from tests.triton_models.engine.kernels.paged import NOWHERE
from triton_models.engine.kernels.rotate_store import rotate_store
from triton_models.engine.operations import rotate_in_place

BLOCK_SIZE = 16
POSITIONS = [0, 15, 16, 40]
ROWS = [2, 0, 0, 1]
TABLES = [[3, 1, NOWHERE], [NOWHERE, NOWHERE, 5], [4, NOWHERE, NOWHERE]]
SLOTS = [4 * 16, 3 * 16 + 15, 1 * 16, 5 * 16 + 8]


class Step:
    """Four tokens of three sequences, and an empty cache of six blocks."""

    def __init__(
        self,
        query_heads: int,
        kv_heads: int,
        head_dim: int,
        pairs: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.query_heads, self.kv_heads = query_heads, kv_heads
        generator = torch.Generator().manual_seed(1)
        size = (len(POSITIONS), query_heads + 2 * kv_heads, head_dim)
        self.projected = torch.randn(size, generator=generator).to(device, dtype)
        angles = torch.rand(64, pairs, generator=generator).to(device) * 100
        self.cos, self.sin = angles.cos(), angles.sin()
        self.keys = torch.full((6, BLOCK_SIZE, kv_heads, head_dim), 7.0, dtype=dtype, device=device)
        self.values = self.keys.clone()

    def run(self, positions: list[int]) -> None:
        def integers(numbers: list[int] | list[list[int]]) -> Tensor:
            return torch.tensor(numbers, dtype=torch.int32, device=self.keys.device)

        rotate_store(
            self.projected, self.cos, self.sin, integers(positions), integers(TABLES), integers(ROWS),
            self.keys, self.values, query_heads=self.query_heads,
        )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("query_heads", "kv_heads", "head_dim", "pairs"),
    [(32, 2, 128, 32), (6, 2, 16, 4), (4, 1, 32, 8), (3, 3, 16, 8), (2, 1, 16, 3)],
)
def test_equals_the_plain_rotation_bit_for_bit(
    *, device: torch.device, query_heads: int, kv_heads: int, head_dim: int, pairs: int, dtype: torch.dtype
) -> None:
    step = Step(query_heads, kv_heads, head_dim, pairs, dtype=dtype, device=device)
    expected = step.projected.clone()
    original = step.projected.clone()
    first_value = query_heads + kv_heads
    rotate_in_place(expected[:, :first_value], step.cos[POSITIONS, None, :], step.sin[POSITIONS, None, :])
    step.run(POSITIONS)
    assert torch.equal(step.projected[:, :query_heads], expected[:, :query_heads])
    assert torch.equal(step.projected[:, query_heads:], original[:, query_heads:])
    keys, values = step.keys.flatten(0, 1), step.values.flatten(0, 1)
    assert torch.equal(keys[SLOTS], expected[:, query_heads:first_value])
    assert torch.equal(values[SLOTS], original[:, first_value:])
    untouched = [slot for slot in range(len(keys)) if slot not in SLOTS]
    assert (keys[untouched] == 7).all()
    assert (values[untouched] == 7).all()


def test_padding_writes_nothing(device: torch.device) -> None:
    step = Step(6, 2, 16, 4, dtype=torch.float32, device=device)
    original = step.projected.clone()
    step.run([-1, -1, -1, 40])
    assert torch.equal(step.projected[:3], original[:3])
    keys = step.keys.flatten(0, 1)
    assert (keys[SLOTS[:3]] == 7).all()
    assert (keys[SLOTS[3]] != 7).all()


def test_what_lies_beyond_the_rotary_numbers_never_meets_a_zero_sine(device: torch.device) -> None:
    step = Step(6, 2, 16, 4, dtype=torch.float32, device=device)
    step.projected[0, 0, 8] = torch.inf
    step.run(POSITIONS)
    assert step.projected[0, 0, 8] == torch.inf
    assert not step.projected.isnan().any()
