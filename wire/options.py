"""The options of an engine and its entry: each is declared once, here, and everything else is derived.

The parameters in an entry's `config.pbtxt`, the flags and environment variables of all programs that start
engines, `tritongate up` among them, and the table in this package's README.
"""

from dataclasses import dataclass
from typing import Final

Value = int | float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option of the engine or of its entry."""

    name: str
    """In `config.pbtxt`; `flag` is derived from it."""
    kind: type[int] | type[float] | type[str]
    help: str
    """One sentence for people who set it, with the unit."""
    default: str
    """What applies if it is not set, in words or as the value itself."""
    gpu: Value | None = None
    """The value that applies on a GPU if it is not set, where that differs."""
    least: float | None = None
    """The smallest value; with `least_open`, values must be over it."""
    least_open: bool = False
    most: float | None = None
    """The largest value."""
    choices: tuple[str, ...] = ()
    """The only values, if there are any here."""

    @property
    def flag(self) -> str:
        """The command-line flag, such as `--max-context`."""
        return "--" + self.name.replace("_", "-")

    @property
    def default_text(self) -> str:
        """What applies if it is not set, on a GPU too, for help texts and tables."""
        return self.default if self.gpu is None else f"{self.default}; {self.gpu} on a GPU"

    @property
    def range_text(self) -> str:
        """Which values it takes, in words; empty: any."""
        if self.choices:
            return " or ".join((", ".join(self.choices[:-1]), self.choices[-1]))
        limits = []
        if self.least is not None:
            limits.append(f"{'over' if self.least_open else 'at least'} {self.least:,.12g}")
        if self.most is not None:
            limits.append(f"at most {self.most:,.12g}")
        return " and ".join(limits)

    def parse(self, text: str) -> Value:
        """Return the value that `text` stands for.

        Raises:
            ValueError: it is no number, out of range or not among the choices; the message names the option.
        """
        try:
            value: Value = self.kind(text)
        except ValueError:
            what = "a whole number" if self.kind is int else "a number"
            raise ValueError(f"{self.name}: {text!r} is not {what}") from None
        if isinstance(value, str):
            fits = not self.choices or value in self.choices
        else:
            low = self.least is None or (value > self.least if self.least_open else value >= self.least)
            fits = low and (self.most is None or value <= self.most)  # nan does not fit any limit
        if not fits:
            raise ValueError(f"{self.name} must be {self.range_text}, not {value}")
        return value


OPTIONS: Final = (
    Option(
        name="format", kind=str, default="found in the checkpoint",
        choices=("chatglm2", "chatglm3", "glm4", "template"),
        help="The chat format, where the checkpoint's files and name do not tell.",
    ),
    Option(
        name="engine", kind=str, default="own", choices=("own", "transformers"),
        help="Whose forward pass computes: our own, or that of transformers, which is slower, for other "
        "causal models that it implements.",
    ),
    Option(
        name="dtype", kind=str, default="auto", choices=("auto", "float32", "bfloat16", "float16"),
        help="The type of weights and KV cache.",
    ),
    Option(
        name="quantization", kind=str, default="none", choices=("int8", "fp8", "int4"),
        help="Weights of fewer bits, quantised while loading: int8 by rows, int4 by groups of 128; "
        "fp8 by rows, with what they are multiplied by, on GPUs since Ada and Hopper.",
    ),
    Option(
        name="max_context", kind=int, default="the model's own",
        least=32,  # the chat format of a message and the warm-up take up to twenty
        help="Tokens of prompt and answer together.",
    ),
    Option(
        name="kv_memory_gib", kind=float, default="a share of what is free",
        least=0, least_open=True, most=2**20,
        help="Memory for the KV cache, in GiB.",
    ),
    Option(
        name="memory_share", kind=float, default="what is free", least=0, least_open=True, most=1,
        help="Share of the device's memory that this model divides with nobody, weights included.",
    ),
    Option(
        name="max_running", kind=int, default="128", gpu=512, least=1,
        help="Sequences in one step of the engine.",
    ),
    Option(
        name="max_waiting", kind=int, default="512", least=0,
        help="Open requests beyond `max_running`; more are refused.",
    ),
    # A GPU computes many tokens in the time it takes to read the weights once. With twice as many prompt
    # tokens in a step, each takes 5 to 7 % less time, with four times as many no less (bench/LOG.md). But the
    # decodes in it stall twice as long: worth it only while many prompts wait.
    Option(
        name="max_batched_tokens", kind=int, default="1024", least=1,
        help="Tokens in one step of the engine, of prompts and answers together.",
    ),
    Option(
        name="burst_tokens", kind=int, default="max_batched_tokens", gpu=2048, least=1,
        help="Tokens in one step of the engine for a burst of prompts: when six such steps of them wait.",
    ),
    Option(
        name="burst_steps", kind=int, default="0", gpu=4, least=0,
        help="Consecutive steps that may leave out running answers for a burst of prompts.",
    ),
    Option(
        name="draft_tokens", kind=int, default="16", least=0, most=64,
        help="Guesses at an answer's next tokens in one step, where it repeats text or obeys a schema.",
    ),
    Option(
        name="heartbeat_s", kind=float, default="2", least=0, least_open=True, most=10,
        help="Seconds of silence after which a running request gets a heartbeat.",
    ),
    Option(
        name="trace_endpoint", kind=str, default="no spans",
        help="URL of an OTLP/HTTP collector for the spans of traced requests.",
    ),
)  # fmt: skip
"""Every option, in the order of help texts and tables."""
