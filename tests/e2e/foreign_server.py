"""A Triton with models of other people's backends, played by `foreign_model.py`, and a gateway before it."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.e2e.serve_process import ServeProcess
from tests.e2e.stock_server import StockServer, stock_server
from tests.e2e.up_process import GOLDEN
from triton_models.entries import ModelEntry
from triton_models.entries import write_entry as write_own_entry

TEXT = ("text_input", "TYPE_STRING", 1)
INPUTS: dict[str, list[tuple[str, str, int]]] = {
    "vllm": [
        TEXT,
        ("stream", "TYPE_BOOL", 1),
        ("sampling_parameters", "TYPE_STRING", 1),
        ("exclude_input_in_output", "TYPE_BOOL", 1),
        ("return_finish_reason", "TYPE_BOOL", 1),
        ("return_num_input_tokens", "TYPE_BOOL", 1),
        ("return_num_output_tokens", "TYPE_BOOL", 1),
        ("return_logprobs", "TYPE_BOOL", 1),
        ("return_cumulative_logprob", "TYPE_BOOL", 1),
        ("image", "TYPE_STRING", -1),
    ],
    "llmapi": [
        TEXT,
        ("streaming", "TYPE_BOOL", 1),
        *(
            (f"return_{name}", "TYPE_BOOL", 1)
            for name in ("finish_reason", "stop_reason", "cumulative_logprob")
        ),
        *((f"sampling_param_{name}", "TYPE_INT32", 1) for name in ("max_tokens", "top_k", "best_of")),
        *((f"sampling_param_{name}", "TYPE_FP32", 1) for name in ("temperature", "top_p")),
        *((f"sampling_param_{name}_penalty", "TYPE_FP32", 1) for name in ("frequency", "presence")),
        ("sampling_param_seed", "TYPE_UINT64", 1),
        ("sampling_param_stop", "TYPE_STRING", -1),
        ("sampling_param_exclude_input_from_output", "TYPE_BOOL", 1),
        ("sampling_param_return_perf_metrics", "TYPE_BOOL", 1),
        ("image_url", "TYPE_STRING", -1),
        ("lora_id", "TYPE_UINT64", 1),
        *((f"lora_{name}", "TYPE_STRING", 1) for name in ("name", "path")),
    ],
    "ensemble": [
        TEXT,
        *((name, "TYPE_INT32", 1) for name in ("max_tokens", "top_k", "min_tokens")),
        *((name, "TYPE_INT32", 1) for name in ("beam_width", "end_id", "pad_id", "num_return_sequences")),
        *((name, "TYPE_FP32", 1) for name in ("temperature", "top_p")),
        *((f"{name}_penalty", "TYPE_FP32", 1) for name in ("repetition", "presence", "frequency", "length")),
        *((name, "TYPE_BOOL", 1) for name in ("stream", "exclude_input_in_output", "return_log_probs")),
        ("seed", "TYPE_UINT64", 1),
        ("stop_words", "TYPE_STRING", -1),
        ("bad_words", "TYPE_STRING", -1),
        ("embedding_bias_words", "TYPE_STRING", -1),
        ("embedding_bias_weights", "TYPE_FP32", -1),
        ("guided_decoding_guide_type", "TYPE_STRING", 1),
        ("guided_decoding_guide", "TYPE_STRING", 1),
        *((f"return_num_{which}_tokens", "TYPE_BOOL", 1) for which in ("input", "output")),
    ],
}
OLDER = {"seed": "random_seed", "min_tokens": "min_length", "top_k": "runtime_top_k"}
"""Names in releases that counted no tokens."""
INPUTS["bls"] = [
    (OLDER.get(name, name), kind, size)
    for name, kind, size in INPUTS["ensemble"]
    if not name.startswith("return_")
]
INPUTS["inner"] = [
    ("input_ids", "TYPE_INT32", -1),
    *((name, "TYPE_INT32", 1) for name in ("input_lengths", "request_output_len", "end_id", "pad_id")),
    *((name, "TYPE_INT32", 1) for name in ("beam_width", "runtime_top_k", "min_tokens")),
    *((name, "TYPE_BOOL", 1) for name in ("streaming", "exclude_input_in_output", "stop")),
    ("return_log_probs", "TYPE_BOOL", 1),
    *((name, "TYPE_FP32", 1) for name in ("temperature", "runtime_top_p", "len_penalty")),
    *((f"{name}_penalty", "TYPE_FP32", 1) for name in ("repetition", "presence", "frequency")),
    ("seed", "TYPE_UINT64", 1),
    ("stop_words_list", "TYPE_INT32", -1),
    ("bad_words_list", "TYPE_INT32", -1),
    ("guided_decoding_guide_type", "TYPE_STRING", 1),
    ("guided_decoding_guide", "TYPE_STRING", 1),
]
PER_TOKEN = ("output_ids", "output_log_probs")
"""Outputs with a row for each sequence."""
REQUIRED = ("TEXT", "text_input", "input_ids", "input_lengths", "request_output_len")
INPUTS["vllm"] += [("embedding_request", "TYPE_STRING", 1)]
EMBEDDING = {"plain": [("TEXT", "TYPE_STRING", 1)], "vllm_embeds": INPUTS["vllm"]}
"""Models that write no text."""
OUTPUTS = {
    "vllm": [
        ("text_output", "TYPE_STRING"),
        ("finish_reason", "TYPE_STRING"),
        ("num_input_tokens", "TYPE_UINT32"),
        ("num_output_tokens", "TYPE_UINT32"),
        ("logprobs", "TYPE_STRING"),
        ("cumulative_logprob", "TYPE_FP32"),
    ],
    "llmapi": [
        ("text_output", "TYPE_STRING"),
        ("finish_reason", "TYPE_STRING"),
        ("stop_reason", "TYPE_STRING"),
        ("cumulative_logprob", "TYPE_FP32"),
    ],
    "ensemble": [
        ("text_output", "TYPE_STRING"),
        ("cum_log_probs", "TYPE_FP32"),
        ("output_log_probs", "TYPE_FP32"),
        ("num_input_tokens", "TYPE_INT32"),
        ("num_output_tokens", "TYPE_INT32"),
    ],
    "bls": [("text_output", "TYPE_STRING")],
    "plain": [("sentence_embedding", "TYPE_FP32")],
    "inner": [
        ("output_ids", "TYPE_INT32"),
        ("sequence_length", "TYPE_INT32"),
        ("cum_log_probs", "TYPE_FP32"),
        ("output_log_probs", "TYPE_FP32"),
    ],
}
OUTPUTS["vllm_embeds"] = OUTPUTS["vllm"]
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{{ '\n' }}{% endfor %}"
    "{% if tools %}<tool_call>{% endif %}<|assistant|>{% if enable_thinking %}<think>{% endif %}"
)


def write_entry(repository: Path, plays: str, *, name: str = "", decoupled: bool = True) -> None:
    folder = repository / (name or plays)
    (folder / "1").mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("foreign_model.py"), folder / "1" / "model.py")
    inputs = ",\n".join(
        f'{{ name: "{name}" data_type: {kind} dims: [ {dims} ] optional: {optional} }}'
        for name, kind, size in (INPUTS | EMBEDDING)[plays]
        for dims in (f"2, {size}" if name.endswith("_list") else size,)
        for optional in (str(name not in REQUIRED).lower(),)
    )
    outputs = ",\n".join(
        f'{{ name: "{name}" data_type: {kind} dims: [ {dims} ] }}'
        for name, kind in OUTPUTS[plays]
        for dims in ("-1, -1" if name in PER_TOKEN else "-1",)
    )
    batch = 8 if plays in ("ensemble", "bls", "inner", "plain") else 0
    (folder / "config.pbtxt").write_text(
        f'backend: "python"\nmax_batch_size: {batch}\n'
        f"model_transaction_policy {{ decoupled: {str(decoupled).lower()} }}\n"
        f"input [ {inputs} ]\noutput [ {outputs} ]\n"
        f'parameters {{ key: "plays" value {{ string_value: "{plays}" }} }}\n'
        "instance_group [ { count: 1 kind: KIND_CPU } ]\n"
    )


def write_tokenizer(folder: Path) -> None:
    """Write one whose tokens are characters; an answer ends with `~`."""
    words = {token: id_ for id_, token in enumerate([*map(chr, range(32, 127)), "\n"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "~", "pad_token": "_"}))


@dataclass(frozen=True)
class Foreign:
    """The running gateway."""

    gateway: ServeProcess
    server: StockServer
    repository: Path

    def cancelled(self, model: str) -> Path:
        """Return the file that a played model leaves when a request of it was cancelled."""
        return self.repository / model / "cancelled"


@contextlib.contextmanager
def foreign_server(folder: Path) -> Iterator[Foreign]:
    """Run both until the block ends; one of our own models is there, too, as `chatglm`."""
    repository = folder / "repository"
    for plays in INPUTS | EMBEDDING:
        write_entry(repository, plays)
    write_entry(repository, "llmapi", name="once", decoupled=False)
    options = {"dtype": "float32"}
    own = ModelEntry(name="chatglm", checkpoint=str(GOLDEN / "chatglm3"), options=options)
    write_own_entry(repository, model=own)
    write_tokenizer(folder / "tokenizer")
    with stock_server(repository, temporary=folder) as server:
        adapters = "tuned=vllm,absent=vllm,other=bls"
        flags = ("--tokenizers", str(folder / "tokenizer"), "--adapters", adapters)
        gateway = ServeProcess(server.grpc, *flags, log_level="info")
        try:
            yield Foreign(gateway, server, repository)
        finally:
            gateway.close()
