"""What the server says on stderr: plain lines or one JSON object a line, and a line for each request.

A line of a request has its id (`X-Request-Id`), method, path, status, seconds and tokens; any other line that
is written while a request is handled has the id. There is no header, query string, prompt or answer in them.
Status 499 is of a client that left before its answer was complete.
"""

from __future__ import annotations

import json
import logging
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["plain", "json"]

request_label: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The id of the request that is being handled; None outside of one."""


class JsonLines(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message; request_id, and of a request's own line the
    fields of `transport.AccessLog`; exception, with its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (label := request_label.get()) is not None:
            line["request_id"] = label
        line |= getattr(record, "request", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class PlainLines(logging.Formatter):
    """Lines for people, with the id of the request they belong to."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s%(of_request)s")

    def format(self, record: logging.LogRecord) -> str:
        label = request_label.get()
        record.of_request = "" if label is None else f" [{label}]"
        return super().format(record)


def logging_config(log_format: LogFormat, level: int) -> dict[str, Any]:
    """For `logging.config.dictConfig`: uvicorn's warnings, and ours from `level` on, to stderr, since stdout
    belongs to results."""
    kind = JsonLines if log_format == "json" else PlainLines
    to_stderr = {"handlers": ["stderr"], "propagate": False}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"lines": {"()": kind}},
        "handlers": {
            "stderr": {"class": "logging.StreamHandler", "stream": "ext://sys.stderr", "formatter": "lines"}
        },
        "loggers": {
            "uvicorn": {**to_stderr, "level": "WARNING"},
            "jaxinfer": {**to_stderr, "level": level},
        },
    }
