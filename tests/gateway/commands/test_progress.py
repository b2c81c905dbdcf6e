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
