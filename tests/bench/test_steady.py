"""Tokens are read from the gateway's own counter, of all models and whatever else it tells."""

from bench.steady import generated

EXPOSITION = """\
# HELP tritongate_generated_tokens_total Tokens received from Triton.
# TYPE tritongate_generated_tokens_total counter
tritongate_generated_tokens_total{model="a"} 1200.0
tritongate_generated_tokens_total{model="b"} 1e+06
tritongate_generated_tokens_created{model="a"} 5.0
tritongate_prompt_tokens_total{model="a"} 7.0
"""


def test_tokens_of_all_models_count() -> None:
    assert generated(EXPOSITION) == 1_001_200
    assert generated("") == 0
