import json
import struct
from typing import Any

import msgspec
import pytest

from wire.grammar import Grammar
from wire.request import (
    Cancel,
    ChannelStream,
    Detokenize,
    Generation,
    OpenChannel,
    Probe,
    Request,
    Tokenize,
    TokenizerFiles,
    decode_request,
    encode_request,
)
from wire.sampling import Sampling

FULL = Generation(
    request_id="r",
    role="observation",
    prompt_token_ids=[1, 2],
    n=128,
    max_tokens=1,
    max_total_tokens=4096,
    min_tokens=1,
    raw=True,
    blank_start=True,
    answer_metadata="",
    end_after_call_of=["a"],
    grammar=Grammar("regex", "a+"),
    length_penalty=-10.0,
    early_stopping="never",
    temperature=0,
    top_p=0.5,
    top_k=4,
    min_p=0.1,
    repetition_penalty=1.2,
    presence_penalty=-2.0,
    frequency_penalty=2.0,
    seed=-(2**63),
    logit_bias={5: -100.0, 6: 100.0},
    allowed_token_ids=[1, 2],
    bad_words=["a"],
    truncate_prompt_tokens=-1,
    logprobs=20,
    stop=["\n"],
    stop_token_ids=[7],
    ignore_eos=True,
    include_stop=True,
    show_special=True,
    echo=True,
    generated=[[1, 2], [], *[None] * 126],
    channel=ChannelStream(id="c", stream=0, ids=True),
    return_token_ids=True,
    priority=-100,
    deadline_ms=1,
    prompt_logprobs=20,
    prompt_ranks=True,
)


def test_every_field_comes_back() -> None:
    assert decode_request(encode_request(FULL)) == FULL
    document = msgspec.json.decode(encode_request(FULL))
    # A beam search is not for most of the others, nor are logits.
    assert set(document) == {field.name for field in msgspec.structs.fields(Generation)} - {
        "v",
        "logits",
        "beam_width",
    }


def test_logits_come_alone() -> None:
    alone = b'{"logits":true,"max_tokens":0,"prompt_token_ids":[1]'
    assert decode_request(alone + b"}") == Generation(logits=True, max_tokens=0, prompt_token_ids=[1])
    for other in (b'"n":2', b'"prompt_logprobs":0', b'"channel":{"id":"c","stream":0}', b'"echo":true'):
        with pytest.raises(msgspec.ValidationError, match="logits come alone"):
            decode_request(alone + b"," + other + b"}")
    for tokens in (b"", b',"max_tokens":1'):
        with pytest.raises(msgspec.ValidationError, match="logits come alone"):
            decode_request(b'{"logits":true' + tokens + b"}")


def test_a_beam_search_comes_back() -> None:
    search = Generation(
        beam_width=16, n=16, length_penalty=2.0, early_stopping=True, seed=1, generated=[[], *[None] * 15]
    )
    assert decode_request(encode_request(search)) == search
    assert (search.sequences, Generation(beam_width=3).sequences, FULL.sequences) == (16, 3, 128)
    assert Sampling.excluded_by_beams({"temperature": 1.0, "top_k": 0, "logit_bias": {}, "seed": 3}) is None
    assert Sampling.excluded_by_beams({"logit_bias": {1: 0.0}}) == "logit_bias"


def test_a_generation_is_sampled_as_its_sampling_says() -> None:
    shared = {name: getattr(FULL, name) for name in Sampling.__struct_fields__}
    assert Sampling(**shared) == msgspec.convert(shared, Sampling)
    assert set(Sampling.__struct_fields__) < set(Generation.__struct_fields__)


def test_nothing_is_a_generation_with_every_default() -> None:
    assert decode_request(b"") == decode_request(b"{}") == Generation()
    assert encode_request(Generation()) == b"{}"


@pytest.mark.parametrize(
    ("document", "request_"),
    [
        (b'{"cancel":"r"}', Cancel("r")),
        (b'{"probe":true,"v":1}', Probe(probe=True)),
        (b'{"open_channel":"c"}', OpenChannel("c")),
        (b'{"tokenizer_files":true}', TokenizerFiles(tokenizer_files=True)),
        (b'{"tokenize":"text"}', Tokenize(tokenize="text")),
        (
            b'{"tokenize":"text","prefix":true,"strings":true,"deadline_ms":5}',
            Tokenize(tokenize="text", prefix=True, strings=True, deadline_ms=5),
        ),
        (
            b'{"tokenize":"conversation","role":"observation","add_generation_prompt":false}',
            Tokenize(tokenize="conversation", role="observation", add_generation_prompt=False),
        ),
        (
            b'{"tokenize":"conversation","answer_metadata":"now"}',
            Tokenize(tokenize="conversation", answer_metadata="now"),
        ),
        (b'{"detokenize":[]}', Detokenize(detokenize=[])),
        (b'{"detokenize":[1,64790],"strings":true}', Detokenize(detokenize=[1, 64790], strings=True)),
    ],
)
def test_the_other_kinds_are_distinguished_by_their_keys(document: bytes, request_: Request) -> None:
    assert decode_request(document) == request_
    assert decode_request(encode_request(request_)) == request_


@pytest.mark.parametrize(
    ("document", "where"),
    [
        (b'{"cancel":"r","probe":true}', "probe"),
        (b'{"cancel":"r","max_tokens":1}', "max_tokens"),
        (b'{"cancel":""}', "cancel"),
        (b'{"probe":false}', "probe"),
        (b'{"probe":true,"stream":true}', "stream"),
        (b'{"open_channel":""}', "open_channel"),
        (b'{"tokenizer_files":false}', "tokenizer_files"),
        (b'{"tokenizer_files":true,"strings":true}', "strings"),
        (b'{"open_channel":"c","stream":true}', "stream"),
        (b'{"channel":"c"}', "channel"),
        (b'{"channel":{"id":"c"}}', "stream"),
        (b'{"channel":{"id":"c","stream":-1}}', "stream"),
        (b'{"prompt_ranks":true}', "which are absent"),
        (b'{"truncate_prompt_tokens":0}', "nothing of the prompt"),
        (b'{"beam_width":17}', "beam_width"),
        (b'{"beam_width":2,"n":3}', "more than the 2 beams"),
        *(
            (json.dumps({"beam_width": 2, name: value}).encode(), f"{name} is not for a beam search")
            for name, value in (("temperature", 0), ("top_k", 2), ("bad_words", ["a"]), ("min_tokens", 1))
        ),
        (b'{"beam_width":2,"grammar":{"kind":"regex","text":"a"}}', "no grammar"),
        (b'{"beam_width":2,"n":2,"seed":1,"generated":[[],[1]]}', "begins anew"),
        (b'{"length_penalty":11}', "length_penalty"),
        (b'{"early_stopping":"often"}', "early_stopping"),
        (b'{"truncate_prompt_tokens":-2}', "truncate_prompt_tokens"),
        (b'{"allowed_token_ids":[]}', "allowed_token_ids"),
        (b'{"bad_words":[""]}', "bad_words"),
        (b'{"channel":{"id":"c","stream":9223372036854775807},"n":2}', "int64"),
        (b'{"stream":true}', "stream"),
        (b'{"tokenize":"words"}', "tokenize"),
        (b'{"tokenize":"text","detokenize":[1]}', "detokenize"),
        (b'{"tokenize":"text","max_tokens":1}', "max_tokens"),
        (b'{"tokenize":"text","role":"system"}', "belong to a conversation"),
        (b'{"tokenize":"text","answer_metadata":""}', "belong to a conversation"),
        (b'{"tokenize":"conversation","prefix":true}', "belongs to text"),
        (
            b'{"tokenize":"conversation","answer_metadata":"a","add_generation_prompt":false}',
            "after which the answer",
        ),
        (b'{"detokenize":[-1]}', "detokenize"),
        (b'{"detokenize":[1],"prefix":true}', "prefix"),
        (b'{"choices":2}', "choices"),
        (b'{"v":2}', r"\$\.v"),
        (b'{"logit_bias":{"x":1}}', "logit_bias"),
        (b"[]", "array"),
        (b"null", "null"),
    ],
)
def test_what_no_kind_knows_is_refused(document: bytes, where: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=where):
        decode_request(document)


@pytest.mark.parametrize(
    ("field", "inside", "outside"),
    [
        ("request_id", ["r", "r" * 128], ["", "r" * 129, 1]),
        ("role", ["user", "system", "assistant", "observation"], ["tool"]),
        ("prompt_token_ids", [[0]], [[], [-1], [1.5], "1"]),
        (
            "grammar",
            [{"kind": "json_object"}, {"kind": "lark", "text": "x" * 2**18}],
            [
                "a",
                {},
                {"kind": "prolog"},
                {"kind": "regex", "text": "x" * (2**18 + 1)},
                {"kind": "regex", "x": 1},
            ],
        ),
        ("n", [1, 128], [0, 129, 1.5, True]),
        ("max_tokens", [0, 1, 10**9], [-1, 1.5, "1", True]),
        ("min_tokens", [0], [-1]),
        ("temperature", [0, 2, 0.3], [-0.01, 2.01, "1"]),
        ("top_p", [0, 1e-9, 1], [-0.01, 1.01]),
        ("top_k", [0, 10**6], [-1]),
        ("min_p", [0, 1], [-0.01, 1.01]),
        ("repetition_penalty", [0.01, 1, 100], [0, 100.1]),
        ("presence_penalty", [-2, 2], [-2.01, 2.01]),
        ("frequency_penalty", [-2, 2], [-2.01, 2.01, "1"]),
        ("seed", [-(2**63), 2**63 - 1], [-(2**63) - 1, 2**63]),
        (
            "logit_bias",
            [{}, {"5": -100, "6": 100}, {str(each): 1 for each in range(1024)}],
            [{"5": 100.5}, {"-1": 0}, {str(each): 1 for each in range(1025)}],
        ),
        ("logprobs", [0, 20], [-1, 21]),
        ("prompt_logprobs", [0, 20], [-1, 21, True]),
        ("stop", [[], ["a"] * 16, ["停" * 1024]], [[""], ["a"] * 17, "a", ["a" * 1025]]),
        ("stop_token_ids", [[], [0]], [[-1]]),
        ("ignore_eos", [True], [1]),
        ("priority", [-100, 100], [-101, 101]),
        ("deadline_ms", [1], [0]),
    ],
)
def test_ranges(field: str, inside: list[Any], outside: list[Any]) -> None:
    for value in inside:
        decode_request(msgspec.json.encode({field: value}))
    for value in outside:
        with pytest.raises(msgspec.ValidationError, match=field):
            decode_request(msgspec.json.encode({field: value}))


def test_a_top_p_of_0_keeps_the_most_likely_token_in_a_range_that_all_backends_have() -> None:
    asked = decode_request(b'{"top_p": 0, "n": 2}')
    assert asked == decode_request(msgspec.json.encode(asked))
    for least in (asked, Sampling(top_p=0), msgspec.structs.replace(Sampling(), top_p=0.0)):
        assert 0 < least.top_p < 1 / 2**20
        assert struct.unpack("<f", struct.pack("<f", least.top_p))[0] > 0


@pytest.mark.parametrize("document", [b"{", b"{'seed': 1}", b'{"temperature": NaN}'])
def test_what_is_not_json_is_refused(document: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_request(document)
