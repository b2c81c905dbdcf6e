import subprocess
import sys

import pytest

LOADED = """
import sys, types
sys.modules["triton_python_backend_utils"] = types.ModuleType("")
from triton_models.serving.{name} import TritonPythonModel
raise SystemExit("torch" in sys.modules)
"""


@pytest.mark.parametrize("name", ["stream", "tokenizer", "field"])
def test_torch_is_not_loaded_to_complete_a_configuration(name: str) -> None:
    """Nor at all where no model runs: it takes seconds, and some hundred megabytes."""
    done = subprocess.run([sys.executable, "-c", LOADED.format(name=name)], check=False)
    assert done.returncode == 0
