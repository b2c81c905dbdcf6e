from triton_models.entries import ModelEntry, entry_config
from triton_models.tracing import trace_arguments


def test_without_an_endpoint_triton_is_told_nothing() -> None:
    assert trace_arguments(None) == []


def test_only_what_comes_with_a_parent_is_traced() -> None:
    arguments = trace_arguments("http://c:4318/v1/traces")
    assert "--trace-config=rate=0" in arguments
    assert "--grpc-header-forward-pattern=traceparent" in arguments
    assert "--trace-config=opentelemetry,url=http://c:4318/v1/traces" in arguments


def test_the_engines_entry_knows_where_its_spans_go() -> None:
    options = {"trace_endpoint": "http://c/v1/traces"}
    config = entry_config(ModelEntry(name="m", checkpoint="c", options=options))
    assert config.parameters["trace_endpoint"].string_value == "http://c/v1/traces"
    assert "trace_endpoint" not in entry_config(ModelEntry(name="m", checkpoint="c")).parameters
