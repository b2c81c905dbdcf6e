import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.picture import main

DATA = Path(__file__).parents[2] / "bench" / "data"
IDS = re.compile(r"#?\b[a-z][0-9a-f]{10}\b")
"""Matplotlib makes them of numbers that are rounded nowhere, so they are a processor's own."""


@pytest.mark.parametrize("picture", sorted(DATA.glob("*.svg")), ids=lambda path: path.stem)
def test_the_pictures_are_of_their_data(picture: Path, tmp_path: Path) -> None:
    out = tmp_path / "picture.svg"
    result = CliRunner().invoke(main, [str(picture.with_suffix(".json")), str(out)])
    assert result.exit_code == 0, result.output
    made, kept = (IDS.sub("", path.read_text(encoding="utf-8")) for path in (out, picture))
    assert made == kept
