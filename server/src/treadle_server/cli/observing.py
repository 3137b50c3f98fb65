"""Options about what a server shows of itself: metrics, traces and the log."""

from __future__ import annotations

import gc
import json
import logging
import sys
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Final

import typer

_OBSERVING: Final = "Metrics, traces and the log"
_TEXT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class LogFormat(StrEnum):
    """How lines of the log are written."""

    TEXT = "text"
    JSON = "json"


class LogLevel(StrEnum):
    """The least important lines of the log that are written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservingFlags:
    """What a server shows of itself."""

    metrics_port: Annotated[
        int | None,
        typer.Option(help="Port of Prometheus metrics (none); 0 takes a free one.", rich_help_panel=_OBSERVING),
    ] = None
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="OpenTelemetry collector that gets traces, such as http://localhost:4317; needs the extra otel.",
            rich_help_panel=_OBSERVING,
        ),
    ] = None
    log_format: Annotated[
        LogFormat, typer.Option(help="Lines of text, or JSON objects.", rich_help_panel=_OBSERVING)
    ] = LogFormat.TEXT
    log_level: Annotated[LogLevel, typer.Option(help="Least important lines to write.", rich_help_panel=_OBSERVING)] = (
        LogLevel.INFO
    )

    def settings(self) -> dict[str, Any]:
        """Return what was given, as settings of ObservedConfig."""
        return {"metrics_port": self.metrics_port, "otlp_endpoint": self.otlp_endpoint}

    def start_log(self) -> None:
        """Write the log to stderr from now on."""
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(JsonFormatter() if self.log_format is LogFormat.JSON else TextFormatter(_TEXT))
        handler.addFilter(_name_request)
        logging.basicConfig(level=self.log_level.upper(), handlers=[handler])


def spare_collector() -> None:
    """Let the garbage collector pass over what lives now, the code of all modules: to go through it takes a tenth of a
    second on a busy machine, and until then no other thread runs and no health check is answered.

    Called before models are loaded: those can still be freed.
    """
    gc.collect()
    gc.freeze()


def _name_request(record: logging.LogRecord) -> bool:
    """Note the request that a line is about, if the code that logs it runs for one."""
    from treadle_server.service.call_record import current_request_id

    record.request_id = current_request_id()
    return True


class TextFormatter(logging.Formatter):
    """Lines for people; a request's id stands at the end of those about it, if they do not name it themselves."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name in the base class
        """Return the line without what follows an error."""
        line = super().formatMessage(record)
        request_id = getattr(record, "request_id", "")
        return f"{line} request_id={request_id}" if request_id and request_id not in line else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, request_id, error, and the facts of a request."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the object."""
        seconds, milliseconds = divmod(int(record.created * 1000), 1000)
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{milliseconds:03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if getattr(record, "request_id", ""):
            line["request_id"] = record.request_id  # type: ignore[attr-defined] # our filter's
        line |= getattr(record, "facts", {})
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
