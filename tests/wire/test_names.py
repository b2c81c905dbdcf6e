from wire import names


def test_entries_are_named_after_their_model() -> None:
    assert names.stream_entry("chatglm3-6b") == "chatglm3-6b-stream"
    assert names.tokenizer_entry("chatglm3-6b") == "chatglm3-6b-tokenizer"


def test_cancels_and_probes_overtake_generations() -> None:
    assert 1 <= names.URGENT_PRIORITY < names.DEFAULT_PRIORITY <= names.PRIORITY_LEVELS
