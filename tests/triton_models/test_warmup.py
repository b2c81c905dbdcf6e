from pathlib import Path

from click.testing import CliRunner

from triton_models import warmup
from wire.history import decode_history
from wire.sampling import Generation, decode_sampling
from wire.strings import unpack_strings


def written(folder: Path, entry: str) -> dict[str, bytes]:
    (folder / entry).mkdir()
    result = CliRunner().invoke(warmup.main, [str(folder / entry)])
    assert result.exit_code == 0, result.output
    return {path.name: path.read_bytes() for path in (folder / entry / "warmup").iterdir()}


def test_the_files_of_a_stream_entry_hold_one_short_greedy_generation(tmp_path: Path) -> None:
    contents = written(tmp_path, "m-stream")
    assert set(contents) == {"prompt", "history", "sampling"}
    (prompt,), (history,), (document,) = (
        unpack_strings(contents[name]) for name in ("prompt", "history", "sampling")
    )
    assert prompt.decode()
    assert decode_history(history) == []
    sampling = decode_sampling(document)
    assert isinstance(sampling, Generation)
    assert (sampling.max_tokens, sampling.temperature, sampling.ignore_eos) == (2, 0.0, True)


def test_an_entry_that_is_not_there(tmp_path: Path) -> None:
    result = CliRunner().invoke(warmup.main, [str(tmp_path / "none")])
    assert result.exit_code == 2
    assert "does not exist" in result.output
