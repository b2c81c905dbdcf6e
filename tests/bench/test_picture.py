from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.picture import main

DATA = Path(__file__).parents[2] / "bench" / "data"


@pytest.mark.parametrize("data", sorted(DATA.glob("*.json")), ids=lambda path: path.stem)
def test_the_pictures_are_of_their_data(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "picture.svg"
    result = CliRunner().invoke(main, [str(data), str(out)])
    assert result.exit_code == 0, result.output
    assert out.read_text(encoding="utf-8") == data.with_suffix(".svg").read_text(encoding="utf-8")
