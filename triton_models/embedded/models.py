"""Determines the served models: writes entries for `--model` arguments, or finds those of a repository."""

from dataclasses import dataclass
from pathlib import Path

from triton_models.directory import format_evidence
from triton_models.embedded.errors import OptionsError
from triton_models.entries import ModelEntry, write_entries
from triton_models.errors import CheckpointError
from triton_models.signatures import Contract, choose_contract
from wire import names

BUILT_IN_NAME = "chatglm3-demo"
BUILT_IN_CHECKPOINT = Path(__file__).parent.parent / "checkpoints" / BUILT_IN_NAME
BUILT_IN_NOTICE = (
    f"{BUILT_IN_NAME} is a demonstration that knows a few pages by heart. "
    "Serve a model of yours with --model DIR"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A model and the repository entries that serve it."""

    name: str
    stream: str
    others: tuple[str, ...]
    """Entries that load independently of the engine's: the tokenizer."""
    dependents: tuple[str, ...] = ()
    """Entries that must load after the engine's: the request/response entries `M`."""

    @property
    def entries(self) -> tuple[str, ...]:
        """All entries of the model, those that load fastest first and those that depend on others last."""
        return (*self.others, self.stream, *self.dependents)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Options that apply to every model of one server; None leaves the choice to the engine."""

    device: str = "cpu"
    dtype: str | None = None
    max_context: int | None = None
    max_running: int | None = None
    max_batched_tokens: int | None = None
    burst_tokens: int | None = None
    burst_steps: int | None = None
    kv_memory_gib: float | None = None
    trace_endpoint: str | None = None
    """URL to which Triton and the models send spans by OTLP/HTTP."""
    contracts: tuple[str, ...] = ()
    """`[NAME=]CONTRACT` for entries `M`; one without a name applies to all models that no other names."""


def read_model_argument(argument: str) -> tuple[str, Path]:
    """Split `[NAME=]DIR`; without a name, the model is named after the folder.

    Raises:
        OptionsError: there is no such directory, or no config.json in it.
    """
    before, equals, after = argument.partition("=")
    if equals and "/" not in before:
        name, path = before, Path(after).expanduser().resolve()
    else:
        path = Path(argument).expanduser().resolve()
        name = path.name
    if not path.is_dir():
        raise OptionsError(f"--model {argument}: {path} is not a directory")
    if not (path / "config.json").is_file():
        raise OptionsError(f"--model {argument}: {path} has no config.json, so it is no checkpoint")
    return name, path


def write_models(repository: Path, arguments: tuple[str, ...], options: ModelOptions) -> list[Served]:
    """Write the entries of the models in `arguments`, or of the built-in model if there are none.

    Raises:
        OptionsError: an argument is not a checkpoint, a name is invalid or occurs twice, or a contract does
            not exist or is for a model that is not served.
    """
    models = [read_model_argument(argument) for argument in arguments]
    if not models:
        models = [(BUILT_IN_NAME, BUILT_IN_CHECKPOINT)]
    contracts = _read_contracts(options.contracts, {name for name, _ in models})
    served: dict[str, Served] = {}
    for name, path in models:
        if name in served:
            raise OptionsError(f"two models are named {name!r}: write --model NAME=DIR to rename one")
        try:
            entry = ModelEntry(
                name=name,
                checkpoint=str(path),
                device=options.device,
                dtype=options.dtype,
                max_context=options.max_context,
                max_running=options.max_running,
                max_batched_tokens=options.max_batched_tokens,
                burst_tokens=options.burst_tokens,
                burst_steps=options.burst_steps,
                kv_memory_gib=options.kv_memory_gib,
                trace_endpoint=options.trace_endpoint,
                contract=contracts.get(name, contracts.get("")) or _contract_of(path),
            )
        except ValueError as error:
            raise OptionsError(f"--model {path}: {error}") from error
        write_entries(repository, model=entry)
        served[name] = _served(repository, name)
    return list(served.values())


def find_models(repository: Path) -> list[Served]:
    """Return the models whose entries are in an existing repository.

    Raises:
        OptionsError: it holds no stream entry.
    """
    found = sorted(repository.glob(f"*{names.STREAM_SUFFIX}/config.pbtxt"))
    if not found:
        raise OptionsError(f"{repository} holds no entry whose name ends in {names.STREAM_SUFFIX}")
    return [_served(repository, entry.parent.name.removesuffix(names.STREAM_SUFFIX)) for entry in found]


def _read_contracts(arguments: tuple[str, ...], models: set[str]) -> dict[str, Contract]:
    """Return the contract of each model named in `arguments`; the one for all others has the empty name."""
    contracts: dict[str, Contract] = {}
    for argument in arguments:
        name, _, contract = argument.rpartition("=")
        if name and name not in models:
            raise OptionsError(f"--contract {argument}: no model is named {name!r}")
        try:
            contracts[name] = choose_contract(contract, None)
        except ValueError as error:
            raise OptionsError(f"--contract {argument}: {error}") from error
    return contracts


def _contract_of(checkpoint: Path) -> Contract:
    try:
        return choose_contract(None, format_evidence(checkpoint))
    except CheckpointError:
        # The entries report what is wrong with the checkpoint when they load.
        return Contract.BATCHED


def _served(repository: Path, name: str) -> Served:
    others, dependents = (
        tuple(entry for entry in entries if (repository / entry).is_dir())
        for entries in ((names.tokenizer_entry(name),), (name,))
    )
    return Served(name=name, stream=names.stream_entry(name), others=others, dependents=dependents)
