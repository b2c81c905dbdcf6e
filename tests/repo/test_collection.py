"""Which files a run with `-m` imports: all that have such a test, and few others."""

from pathlib import Path
from types import SimpleNamespace

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
MODULE = "pytestmark = pytest.mark.e2e\n"
MODULE_OF_SEVERAL = "pytestmark = [\n    pytest.mark.e2e,\n    pytest.mark.timeout(9),\n]\n"
ONE_TEST = "@pytest.mark.e2e\ndef test_one() -> None: ...\n"
NONE = "from tests.e2e.up_process import UpProcess\n"


@pytest.mark.parametrize(
    ("text", "asked", "left_out"),
    [
        (MODULE, "e2e", False),
        (MODULE, "not e2e", True),
        (MODULE_OF_SEVERAL, "e2e", False),
        (MODULE_OF_SEVERAL, "not e2e", True),
        (ONE_TEST, "e2e", False),
        (ONE_TEST, "not e2e", False),
        (NONE, "e2e", True),
        (NONE, "not e2e", False),
        (MODULE, "", False),
        (NONE, "e2e or vllm", False),
    ],
)
def test_a_file_is_left_out_only_if_nothing_of_it_would_run(
    pytestconfig: pytest.Config, tmp_path: Path, text: str, asked: str, *, left_out: bool
) -> None:
    (conftest,) = [
        plugin
        for plugin in pytestconfig.pluginmanager.get_plugins()
        if getattr(plugin, "__file__", None) == str(CONFTEST)
    ]
    file = tmp_path / "test_file.py"
    file.write_text(text, encoding="utf-8")
    config = SimpleNamespace(getoption={"markexpr": asked}.get)
    assert bool(conftest.pytest_ignore_collect(file, config)) == left_out
