from typing import Any

import pytest

from triton_models.engine.settings import EngineSettings
from triton_models.errors import SettingsError


@pytest.mark.parametrize(
    "values",
    [
        {"max_context": 1},
        {"max_running": 0},
        {"max_waiting": -1},
        {"max_batched_tokens": 0},
        {"block_size": 0},
        {"kv_blocks": 0},
        {"kv_memory_gib": 0.0},
        {"kv_memory_gib": float("nan")},
        {"kv_memory_gib": float("inf")},
        {"failure_limit": 0},
        {"kv_blocks": 1, "kv_memory_gib": 1.0},
        {"max_batched_tokens": 100, "max_running": 128},
    ],
)
def test_values_out_of_range_are_refused_by_name(values: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=next(iter(values))):
        EngineSettings(**values)
