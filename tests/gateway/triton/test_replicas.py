import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from tritonclient.grpc import service_pb2

from gateway.core.request import Conversation, Message, PlainText
from gateway.errors import NoTemplateError
from gateway.triton import dialects
from gateway.triton.client import Client
from gateway.triton.dialects import Dialects
from gateway.triton.dialects.base import ModelReport
from gateway.triton.dialects.chatglm import CHATGLM
from gateway.triton.errors import Fault, TritonError
from gateway.triton.options import HealthPolicy, PoolOptions
from gateway.triton.replicas import Replica, ReplicaState, unable
from tests.gateway.triton.fake_triton import accepted, generation, hanging, reply, until
from tests.template_checkpoint import write_tokenizer
from triton_models.serving.chat_text import archive_of
from wire.meta import Meta


@contextlib.asynccontextmanager
async def watched(triton: Any, policy: HealthPolicy, *tokenizers: str) -> AsyncIterator[Replica]:
    client = Client(triton.address)
    replica = Replica("m", client, PoolOptions(health=policy, dialects=Dialects(tokenizers)))
    task = asyncio.create_task(replica.watch())
    yield replica
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await replica.channel.close()
    await client.close()


async def becomes(replica: Replica, state: ReplicaState) -> None:
    await until(lambda: replica.state is state)


async def test_a_replica_is_ready_by_a_probe_and_knows_its_model(triton: Any, fast: HealthPolicy) -> None:
    async with watched(triton, fast) as replica:
        assert replica.state is ReplicaState.UNKNOWN
        await becomes(replica, ReplicaState.READY)
        _, report = replica.serving()
        assert report.chat_format == "chatglm3"
        assert report.max_context == 512
        await until(lambda: triton.model.probes > 3)


def templated(triton: Any, folder: Path) -> None:
    """Make the model one whose conversations a template writes."""
    triton.model.report = msgspec.structs.replace(triton.model.report, format="template")
    write_tokenizer(folder)
    triton.model.files = archive_of(folder)


async def chat_of(replica: Replica) -> list[int] | None:
    """Return the ids of a conversation as they are sent; None: it is sent as turns."""
    dialect, report = replica.serving()
    request = generation(prompt=Conversation((Message(role="user", content="hi"),)))
    if dialect.prepare is not None:
        request = await dialect.prepare(request, report)
    dialect.request(request, report, 5.0)
    return list(getattr(request.prompt, "ids", ())) or None


async def test_a_template_comes_with_its_model(triton: Any, fast: HealthPolicy, tmp_path: Path) -> None:
    templated(triton, tmp_path)
    async with watched(triton, fast) as replica:
        await becomes(replica, ReplicaState.READY)
        assert await chat_of(replica)
        assert "enable_thinking" in replica.serving()[1].template_reads
        await until(lambda: triton.model.probes > 3)
        assert triton.model.asked_for_files == 1
        # It comes back as another model.
        triton.model.state = "UNAVAILABLE"
        await becomes(replica, ReplicaState.UNLOADED)
        triton.model.report = msgspec.structs.replace(triton.model.report, format="chatglm3")
        triton.model.state = "READY"
        await becomes(replica, ReplicaState.READY)
        assert await chat_of(replica) is None
        assert triton.model.asked_for_files == 1


async def test_a_model_that_was_loaded_anew_meanwhile_is_asked_again(
    triton: Any, fast: HealthPolicy, tmp_path: Path
) -> None:
    """Triton may replace a model without a moment at which it is not ready."""
    templated(triton, tmp_path)
    triton.model.begun = 5
    async with watched(triton, fast) as replica:
        await becomes(replica, ReplicaState.READY)
        triton.model.begun = 0
        await until(lambda: triton.model.asked_for_files == 2)
        before = triton.model.probes
        await until(lambda: triton.model.probes > before + 3)
        assert replica.state is ReplicaState.READY
        assert await chat_of(replica)
    assert triton.model.asked_for_files == 2


async def test_a_tokenizer_that_is_set_is_preferred(triton: Any, fast: HealthPolicy, tmp_path: Path) -> None:
    templated(triton, tmp_path)
    async with watched(triton, fast, f"m={tmp_path}") as replica:
        await becomes(replica, ReplicaState.READY)
        assert await chat_of(replica)
        assert not triton.model.asked_for_files


@pytest.mark.parametrize(
    ("files", "why"), [(None, "unknown field"), (b"no archive", "not a zip file"), (b"", "not a zip file")]
)
async def test_without_a_tokenizer_a_model_still_completes(
    triton: Any, fast: HealthPolicy, caplog: pytest.LogCaptureFixture, files: bytes | None, why: str
) -> None:
    triton.model.report = msgspec.structs.replace(triton.model.report, format="template")
    triton.model.files = files
    async with watched(triton, fast) as replica:
        await becomes(replica, ReplicaState.READY)
        await until(lambda: triton.model.probes > 3)
        with pytest.raises(NoTemplateError, match="set `tokenizers`"):
            await chat_of(replica)
        dialect, report = replica.serving()
        assert dialect.request(generation(prompt=PlainText("hi")), report, 5.0)
    (told,) = [each for each in caplog.records if "no tokenizer of the model" in each.getMessage()]
    assert "set tokenizers" in told.getMessage()
    assert why in vars(told)["detail"]
    assert triton.model.asked_for_files == 1


async def test_a_model_that_is_lost_while_it_sends_its_tokenizer_is_asked_again(
    triton: Any, fast: HealthPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    templated(triton, tmp_path)
    infer = Client.infer

    async def lost_once(self: Client, request: Any, **more: Any) -> Any:
        if request.id == "tokenizer-files" and not triton.model.asked_for_files:
            triton.model.asked_for_files += 1
            raise TritonError(Fault.UNREACHABLE, "gone")
        return await infer(self, request, **more)

    monkeypatch.setattr(Client, "infer", lost_once)
    async with watched(triton, fast) as replica:
        await becomes(replica, ReplicaState.READY)
        assert await chat_of(replica)
    assert triton.model.asked_for_files == 2


async def test_a_model_without_probes_is_ready_when_triton_says_so(
    triton: Any, fast: HealthPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dialects, "CHATGLM", replace(CHATGLM, probe=None))
    async with watched(triton, fast) as replica:
        await becomes(replica, ReplicaState.READY)
        assert replica.serving()[1] == ModelReport()
        for state, expected in (
            ("LOADING", ReplicaState.NOT_READY),
            ("READY", ReplicaState.READY),
            ("UNAVAILABLE", ReplicaState.UNLOADED),
        ):
            triton.model.state = state
            await becomes(replica, expected)
    assert triton.model.probes == 0


async def test_a_server_that_goes_and_comes_back_is_followed(triton: Any, fast: HealthPolicy) -> None:
    async with watched(triton, fast) as replica:
        await becomes(replica, ReplicaState.READY)
        await triton.stop()
        await becomes(replica, ReplicaState.UNREACHABLE)
        with pytest.raises(TritonError) as raised:
            replica.serving()
        assert raised.value.fault is Fault.UNREACHABLE
        await triton.start()
        await becomes(replica, ReplicaState.READY)


async def test_an_unloaded_model_is_not_ready_and_may_come_back_as_another(
    triton: Any, fast: HealthPolicy
) -> None:
    async with watched(triton, fast) as replica:
        await becomes(replica, ReplicaState.READY)
        triton.model.state = "UNAVAILABLE"
        await becomes(replica, ReplicaState.UNLOADED)
        with pytest.raises(TritonError, match="unloaded"):
            replica.serving()
        triton.model.inputs = ("text_input", "stream")
        triton.model.state = "READY"
        await until(lambda: "stream, text_input" in replica.reason)
        assert replica.state is ReplicaState.NOT_READY
        assert replica.wanted
        triton.model.inputs = ("prompt", "history", "sampling")
        triton.model.report = msgspec.structs.replace(triton.model.report, format="chatglm2")
        await becomes(replica, ReplicaState.READY)
        assert replica.serving()[1].chat_format == "chatglm2"


async def test_what_triton_reloads_in_place_is_seen(triton: Any, fast: HealthPolicy) -> None:
    """As its mode `poll` does, and a load of what is loaded: Triton calls the model ready all the time."""
    common = "text_input", "return_num_output_tokens"
    vllm, llm_api = (*common, "sampling_parameters"), (*common, "sampling_param_max_tokens")
    triton.model.inputs = vllm
    async with watched(triton, fast) as replica:
        for inputs, decoupled, expected in (
            (vllm, True, ("vllm", True)),
            (llm_api, False, ("llm-api", False)),
            (llm_api, True, ("llm-api", True)),
        ):
            triton.model.inputs, triton.model.decoupled = inputs, decoupled
            await until(
                lambda expected=expected: (
                    replica.state is ReplicaState.READY
                    and (replica.dialect, replica.serving()[0].streams) == expected
                )
            )


async def test_what_is_not_meant_to_be_loaded_is_told_from_what_is_missed(
    triton: Any, fast: HealthPolicy
) -> None:
    model = triton.model
    async with watched(triton, fast) as replica:
        await becomes(replica, ReplicaState.READY)
        for state, reason, expected, wanted in (
            ("UNLOADING", "", ReplicaState.UNLOADED, False),
            ("UNAVAILABLE", "unloaded", ReplicaState.UNLOADED, False),
            ("LOADING", "", ReplicaState.NOT_READY, True),
            ("UNAVAILABLE", "Internal: no weights", ReplicaState.NOT_READY, True),
            ("UNAVAILABLE", "unloaded", ReplicaState.UNLOADED, False),
            ("UNAVAILABLE", "Internal: no weights", ReplicaState.UNLOADED, False),
            ("READY", "", ReplicaState.READY, True),
            ("", "", ReplicaState.NOT_READY, True),
        ):
            model.state, model.reason = state, reason
            await becomes(replica, expected)
            assert replica.wanted is wanted
        model.state = "UNAVAILABLE"
        await becomes(replica, ReplicaState.UNLOADED)
        await triton.stop()
        await becomes(replica, ReplicaState.UNREACHABLE)
        assert not replica.wanted


async def test_a_failed_model_that_is_unloaded_is_being_repaired(triton: Any, fast: HealthPolicy) -> None:
    async with watched(triton, fast) as replica:
        await becomes(replica, ReplicaState.READY)
        triton.model.report = msgspec.structs.replace(triton.model.report, heartbeat_age_s=10.5)
        await becomes(replica, ReplicaState.STUCK)
        triton.model.state, triton.model.reason = "UNAVAILABLE", "unloaded"
        await becomes(replica, ReplicaState.NOT_READY)
        assert replica.wanted


async def test_probes_change_nothing_while_it_is_withdrawn(triton: Any, fast: HealthPolicy) -> None:
    async with watched(triton, fast) as replica:
        await becomes(replica, ReplicaState.READY)
        for wanted, state in ((True, ReplicaState.NOT_READY), (False, ReplicaState.UNLOADED)):
            with replica.withdrawn(wanted=wanted):
                probes = triton.model.probes
                await until(lambda probes=probes: triton.model.probes > probes + 2)
                assert (replica.state, replica.wanted) == (state, wanted)
                assert not await replica.ready_within(0.05)
            assert await replica.ready_within(20)
            assert replica.wanted


async def test_a_dead_stub_is_found_though_triton_calls_the_model_ready(
    triton: Any, fast: HealthPolicy
) -> None:
    async def dead(request: Any, context: Any) -> AsyncIterator[Any]:
        yield await context.abort(grpc.StatusCode.INTERNAL, "Stub process 'm_0_0' is not healthy.")

    async with watched(triton, fast) as replica:
        await becomes(replica, ReplicaState.READY)
        triton.model.answer = hanging(accepted())
        dialect, report = replica.serving()
        running = replica.client.stream_infer(
            dialect.request(generation(), report, 100),
            deadline=asyncio.get_running_loop().time() + 100,
            idle_timeout_s=100,
        )
        await anext(running)
        triton.model.probe = dead
        with pytest.raises(TritonError) as raised:
            await anext(running)
        assert raised.value.fault is Fault.STUB_DEAD
        await becomes(replica, ReplicaState.STUCK)
        triton.model.probe = None
        await becomes(replica, ReplicaState.READY)


@pytest.mark.parametrize(("state", "reason"), [("UNAVAILABLE", "unloaded"), ("LOADING", "")])
async def test_requests_of_a_model_that_was_repaired_before_a_probe_saw_it_dead_are_ended(
    triton: Any, fast: HealthPolicy, state: str, reason: str
) -> None:
    async with watched(triton, fast) as replica:
        await becomes(replica, ReplicaState.READY)
        triton.model.answer = hanging(accepted())
        dialect, report = replica.serving()
        running = replica.client.stream_infer(
            dialect.request(generation(), report, 100),
            deadline=asyncio.get_running_loop().time() + 100,
            idle_timeout_s=100,
        )
        await anext(running)
        triton.model.state, triton.model.reason = "UNLOADING", ""
        await becomes(replica, ReplicaState.UNLOADED)
        triton.model.state, triton.model.reason = state, reason
        with pytest.raises(TritonError) as raised:
            await anext(running)
        assert raised.value.fault is Fault.STUB_DEAD


async def test_an_engine_that_stopped_going_round_is_stuck(triton: Any, fast: HealthPolicy) -> None:
    async with watched(triton, fast) as replica:
        await becomes(replica, ReplicaState.READY)
        triton.model.report = msgspec.structs.replace(triton.model.report, heartbeat_age_s=10.5)
        await becomes(replica, ReplicaState.STUCK)
        triton.model.report = msgspec.structs.replace(triton.model.report, heartbeat_age_s=9.5)
        await becomes(replica, ReplicaState.READY)


async def test_a_probe_that_is_late_while_deltas_come_shows_only_that_all_are_busy(
    triton: Any, fast: HealthPolicy
) -> None:
    async with watched(triton, replace(fast, probe_timeout_s=0.05)) as replica:
        await becomes(replica, ReplicaState.READY)
        triton.model.probe = hanging()
        probes = triton.model.probes
        while triton.model.probes < probes + 4:
            replica.channel.delivered_at = asyncio.get_running_loop().time()
            await asyncio.sleep(0.01)
            assert replica.state is ReplicaState.READY
        await becomes(replica, ReplicaState.STUCK)


async def test_a_model_that_does_not_answer_is_told_from_a_server_that_does_not(
    triton: Any, fast: HealthPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watched(triton, replace(fast, probe_timeout_s=0.2)) as replica:
        triton.model.probe = hanging()
        await becomes(replica, ReplicaState.STUCK)

        async def frozen(self: Any) -> bool:
            raise TritonError(Fault.DEADLINE, "frozen")

        monkeypatch.setattr("gateway.triton.client.Client.live", frozen)
        await becomes(replica, ReplicaState.UNREACHABLE)


@pytest.mark.parametrize("state", [ReplicaState.READY, ReplicaState.NOT_READY])
async def test_a_full_queue_is_neither_death_nor_life(
    triton: Any, fast: HealthPolicy, state: ReplicaState
) -> None:
    fulls = 0

    async def full(request: Any, context: Any) -> AsyncIterator[Any]:
        nonlocal fulls
        fulls += 1
        yield service_pb2.ModelStreamInferResponse(error_message="[request id: p] Exceeds maximum queue size")

    async with watched(triton, fast) as replica:
        if state is ReplicaState.NOT_READY:
            triton.model.state = "LOADING"
        await becomes(replica, state)
        triton.model.probe = full
        triton.model.state = "READY"
        await until(lambda: fulls > 3)
        assert replica.state is state


async def test_a_probe_that_cannot_be_understood_is_not_ready_with_the_reason(
    triton: Any, fast: HealthPolicy
) -> None:
    triton.model.report = msgspec.structs.replace(triton.model.report, format="glm9")
    async with watched(triton, fast) as replica:
        await becomes(replica, ReplicaState.NOT_READY)
        assert "glm9" in replica.reason


async def test_a_fault_of_the_check_itself_does_not_end_the_watch(
    triton: Any, fast: HealthPolicy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with watched(triton, fast) as replica:
        await becomes(replica, ReplicaState.READY)
        with monkeypatch.context() as broken:
            broken.setattr("gateway.triton.dialects.chatglm.read", lambda *_: 1 / 0)
            await becomes(replica, ReplicaState.NOT_READY)
        await becomes(replica, ReplicaState.READY)
    assert "ZeroDivisionError" in caplog.text


async def test_a_state_is_logged_when_it_changes_not_at_every_probe(
    triton: Any, fast: HealthPolicy, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        async with watched(triton, fast) as replica:
            await becomes(replica, ReplicaState.READY)
            for age in (11, 12, 13):
                triton.model.report = msgspec.structs.replace(triton.model.report, heartbeat_age_s=age)
                await until(lambda age=age: f"{age} s" in replica.reason)
    assert [record.getMessage() for record in caplog.records] == ["replica is ready", "replica is stuck"]


async def test_a_probe_that_was_asked_before_a_suspicion_and_answered_after_it(
    triton: Any, fast: HealthPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once let a replica be called ready that no request could be made for."""
    asked, release = asyncio.Event(), asyncio.Event()
    become, formats = Replica._become, []

    async def slow(request: Any, context: Any) -> AsyncIterator[Any]:
        asked.set()
        await release.wait()
        yield reply(meta=Meta(probe=triton.model.report), final=True)

    def becoming(replica: Replica, state: ReplicaState, reason: str) -> None:
        before = replica.state
        become(replica, state, reason)
        if before is not state is ReplicaState.READY:
            formats.append(replica.serving()[1].chat_format)

    monkeypatch.setattr(Replica, "_become", becoming)
    async with watched(triton, fast) as replica:
        await becomes(replica, ReplicaState.READY)
        triton.model.probe = slow
        await asked.wait()
        replica.suspect(TritonError(Fault.STUB_DEAD, "the stream broke off"))
        assert replica.state is ReplicaState.STUCK
        release.set()
        await becomes(replica, ReplicaState.READY)
        assert formats == ["chatglm3"] * 2


async def test_one_broken_stream_has_it_probed_and_not_ejected(triton: Any, fast: HealthPolicy) -> None:
    async with watched(triton, replace(fast, interval_s=3600)) as replica:
        await becomes(replica, ReplicaState.READY)
        probes = triton.model.probes
        replica.suspect(TritonError(Fault.UNREACHABLE, "the stream broke off"))
        assert replica.state is ReplicaState.READY
        await until(lambda: triton.model.probes > probes)
        assert replica.state is ReplicaState.READY
        await triton.stop()
        replica.suspect(TritonError(Fault.UNREACHABLE, "the stream broke off"))
        await becomes(replica, ReplicaState.UNREACHABLE)


async def test_a_suspicion_is_looked_into_at_once(triton: Any, fast: HealthPolicy) -> None:
    async with watched(triton, replace(fast, interval_s=3600)) as replica:
        await becomes(replica, ReplicaState.READY)
        replica.suspect(TritonError(Fault.SILENT, "nothing came"))
        suspected = replica.state
        await becomes(replica, ReplicaState.READY)
        replica.suspect(TritonError(Fault.INVALID_REQUEST, "the client's own"))
        assert (suspected, replica.state) == (ReplicaState.STUCK, ReplicaState.READY)
        replica.channel.delivered_at = asyncio.get_running_loop().time()
        probes = triton.model.probes
        assert not replica.suspect(TritonError(Fault.SILENT, "nothing came, but others had tokens"))
        assert replica.state is ReplicaState.READY
        await until(lambda: triton.model.probes > probes)


class Elsewhere:
    """Stands for a client where only its address is needed."""

    address = "elsewhere:8001"


@pytest.mark.parametrize(
    ("states", "fault"),
    [
        ([], Fault.NOT_READY),
        ([ReplicaState.UNKNOWN], Fault.NOT_READY),
        ([ReplicaState.UNREACHABLE, ReplicaState.UNREACHABLE], Fault.UNREACHABLE),
        ([ReplicaState.STUCK], Fault.SILENT),
        ([ReplicaState.STUCK, ReplicaState.UNREACHABLE], Fault.NOT_READY),
    ],
)
async def test_a_request_that_finds_nobody_is_told_why(states: list[ReplicaState], fault: Fault) -> None:
    elsewhere: Any = Elsewhere()
    replicas = [Replica("m", elsewhere, PoolOptions()) for _ in states]
    for replica, state in zip(replicas, states, strict=True):
        replica.state = state
    error = unable(replicas)
    assert error.fault is fault
    assert error.to_gateway().status == 503
    assert error.to_gateway().retry_after_s
