"""A small OTLP/HTTP collector: keeps the spans that processes send, whether as JSON or as protobuf."""

import gzip
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

ERROR = 2
"""https://github.com/open-telemetry/opentelemetry-proto: Status.StatusCode."""


@dataclass
class Span:
    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: list[str]
    status: int

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


@dataclass
class Receiver:
    """`with Receiver() as receiver:` listens at `receiver.endpoint`."""

    spans: list[Span] = field(default_factory=list)

    def __enter__(self) -> Self:
        spans = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                if self.headers["Content-Type"].startswith("application/json"):
                    document = json.loads(body)
                else:
                    message = ExportTraceServiceRequest.FromString(body)
                    document = _with_hex_ids(message)
                spans.extend(_spans(document))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def named(self, name: str, **attributes: Any) -> list[Span]:
        """Return the spans of that name which have these attributes, dots written as `__`."""
        wanted = {key.replace("__", "."): value for key, value in attributes.items()}
        return [
            span for span in self.spans if span.name == name and wanted.items() <= span.attributes.items()
        ]

    def trace(self, trace_id: str) -> list[Span]:
        return [span for span in self.spans if span.trace_id == trace_id]


def _with_hex_ids(message: ExportTraceServiceRequest) -> Any:
    """Return the message as OTLP's JSON has it: ids in hexadecimal, where protobuf's JSON has base64."""
    document = json_format.MessageToDict(message)
    for resource, told in zip(message.resource_spans, document["resourceSpans"], strict=True):
        for scope, said in zip(resource.scope_spans, told["scopeSpans"], strict=True):
            for span, written in zip(scope.spans, said["spans"], strict=True):
                written |= {"traceId": span.trace_id.hex(), "spanId": span.span_id.hex()}
                written["parentSpanId"] = span.parent_span_id.hex()
    return document


def _spans(document: Any) -> list[Span]:
    return [
        Span(
            service=_attributes(resource["resource"])["service.name"],
            name=span["name"],
            trace_id=span["traceId"],
            span_id=span["spanId"],
            parent_id=span.get("parentSpanId", ""),
            start_ns=int(span["startTimeUnixNano"]),
            end_ns=int(span["endTimeUnixNano"]),
            attributes=_attributes(span),
            events=[event["name"] for event in span.get("events", [])],
            status=_status(span.get("status", {}).get("code", 0)),
        )
        for resource in document["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]


def _status(code: int | str) -> int:
    return (
        code
        if isinstance(code, int)
        else ("STATUS_CODE_UNSET", "STATUS_CODE_OK", "STATUS_CODE_ERROR").index(code)
    )


def _attributes(holder: Any) -> dict[str, Any]:
    return {each["key"]: _value(each["value"]) for each in holder.get("attributes", [])}


def _value(value: dict[str, Any]) -> Any:
    ((kind, found),) = value.items()
    if kind == "intValue":
        return int(found)
    if kind == "arrayValue":
        return [_value(each) for each in found.get("values", [])]
    return found
