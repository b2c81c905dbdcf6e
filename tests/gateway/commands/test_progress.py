import pytest

from gateway.commands.progress import Progress, duration


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (59.4, "59 s"), (59.6, "1:00"), (125, "2:05"), (3600, "1:00:00")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_elsewhere_than_on_a_terminal_only_the_last_line_is_sure(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress() as progress:
        for number in range(1000):
            progress.show(f"{number} done")
        progress.say("stopping")
    assert capsys.readouterr().err == "stopping\n999 done\n"


def test_on_a_terminal_a_line_that_is_rewritten_does_not_wrap(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has wrapped stays on the screen when its last row is rewritten."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("gateway.commands.progress._REWRITE_S", 0.0)
    monkeypatch.setenv("COLUMNS", "10")
    with Progress() as progress:
        progress.show("1 of 2 done, waiting")
        assert capsys.readouterr().err == "\r\x1b[K1 of 2 do"
    assert capsys.readouterr().err == "\r\x1b[K1 of 2 done, waiting\n"
