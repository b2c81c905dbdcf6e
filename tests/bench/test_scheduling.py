import pytest
from click.testing import CliRunner

from bench.scheduling import ClosedLoops, main, make_scheduler


def loops(
    *, max_running: int = 64, burst_tokens: int = 2048, burst_steps: int = 4, out: int = 16
) -> ClosedLoops:
    scheduler = make_scheduler(
        max_running=max_running, max_batched_tokens=1024, burst_tokens=burst_tokens, burst_steps=burst_steps
    )
    return ClosedLoops(scheduler, prompt=259, out=out, apart_s=0.00025)


def test_one_client_waits_for_its_prompt_and_then_for_each_step() -> None:
    row = loops().measure(1, 2)
    assert (row.requests, row.failed, row.output_tokens, row.pieces) == (2, 0, 16, 16)
    # 2 ms there, 7.5 ms the prompt, 2 ms back; then steps of one decode.
    assert 11.4 < row.ttft_p50 < 11.6
    assert 3.5 < row.gap_p50 < 3.6


def test_more_clients_than_run_at_once_wait_for_a_place() -> None:
    limited, unlimited = (loops(max_running=most).measure(96, 96) for most in (64, 96))
    # The last ones begin when the first ones' 16 tokens are there, at over 4 ms each.
    assert limited.ttft_p99 > unlimited.ttft_p99 + 15 * 4


def test_decodes_that_pause_have_longer_gaps_and_wait_less_between_them() -> None:
    pausing, going_on = (loops(burst_steps=steps).measure(64, 128) for steps in (4, 0))
    assert pausing.gap_max > 2 * going_on.gap_max
    assert pausing.gap_p50 <= going_on.gap_p50


def test_larger_steps_for_bursts_make_longer_gaps() -> None:
    small, large = (
        loops(max_running=512, burst_tokens=size, out=256).measure(256, 512) for size in (2048, 4096)
    )
    assert large.gap_max > 1.9 * small.gap_max
    assert large.ttft_p50 > small.ttft_p50
    assert large.tokens_per_second > small.tokens_per_second


def test_measurements_follow_each_other_on_one_clock() -> None:
    going_on = loops()
    rows = [going_on.measure(4, 8) for _ in range(3)]
    # The last chunk of each is still on its way when the next begins.
    assert going_on.now == pytest.approx(sum(row.seconds for row in rows) - 3 * 0.002)


def test_the_table_has_a_row_for_each_measurement() -> None:
    done = CliRunner().invoke(main, ["--conc", "1,2", "--repeats", "2", "--out", "4"], catch_exceptions=False)
    assert done.exit_code == 0
    assert len(done.output.splitlines()) == 2 + 4
