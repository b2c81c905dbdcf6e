import pytest

from triton_models.engine.settings import EngineSettings
from triton_models.errors import SettingsError


def test_a_step_has_room_for_all_that_run() -> None:
    with pytest.raises(SettingsError, match="max_batched_tokens 100 is under max_running 128"):
        EngineSettings(max_batched_tokens=100, max_running=128)
