"""Options about what a server shows of itself: metrics, traces and the log."""

from __future__ import annotations

import atexit
import gc
import json
import logging
import os
import queue
import sys
import threading
import time
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Final

import typer

# A thread that answers has the interpreter within this time; Python's own 5 ms add up over the switches of an answer.
_SWITCH_S: Final = 0.001
_STDERR: Final = 2
_MAX_WAITING_LINES: Final = 10_000
_LAST_LINES_S: Final = 2.0
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
        typer.Option(
            min=0, max=65535, help="Port of Prometheus metrics (none); 0 takes a free one.", rich_help_panel=_OBSERVING
        ),
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

    def arguments_of_another(self) -> list[str]:
        """Return the options of another server that is to log and trace as this one does."""
        traces = [] if self.otlp_endpoint is None else ["--otlp-endpoint", self.otlp_endpoint]
        return ["--log-format", self.log_format, "--log-level", self.log_level, *traces]

    def start_log(self) -> None:
        """Write the log to stderr from now on, on a thread of its own."""
        if logging.getLogger().hasHandlers():  # somebody has set up logging, as basicConfig would find too
            return
        handler = _LogThread()
        handler.setFormatter(JsonFormatter() if self.log_format is LogFormat.JSON else TextFormatter(_TEXT))
        logging.basicConfig(level=self.log_level.upper(), handlers=[handler])


def keep_responsive() -> None:
    """Set Python up so that no thread waits long for the others: health checks and streams run beside the model.

    To go through the code of all modules takes the garbage collector a tenth of a second on a busy machine, and
    meanwhile nothing else runs: it passes over what lives now, and that is no model yet, so that those can go.
    """
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(_SWITCH_S)


class _LogThread(logging.Handler):
    """Hands lines to a thread that writes them: whoever reads stderr too slowly holds nobody up, and loses lines."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: queue.Queue[str] = queue.Queue(_MAX_WAITING_LINES)
        threading.Thread(target=self._run, name="treadle-log", daemon=True).start()
        atexit.register(self._finish)

    def emit(self, record: logging.LogRecord) -> None:
        """Note the request that the line is about, if the code that logs it runs for one, and pass the line on."""
        from treadle_server.service.observability.call_record import current_request_id

        record.request_id = current_request_id()
        try:  # now: what it tells of may change, and what cannot be formatted is the fault of this place
            self._waiting.put_nowait(self.format(record))
        except queue.Full:
            return
        except Exception:  # noqa: BLE001 - as every handler of the library does
            self.handleError(record)

    def _run(self) -> None:
        while True:
            line = f"{self._waiting.get()}\n".encode("utf-8", "backslashreplace")
            while line:  # not through sys.stderr, whose lock Python wants at its end
                try:
                    line = line[os.write(_STDERR, line) :]
                except OSError:  # nobody reads any more
                    break
            self._waiting.task_done()

    def _finish(self) -> None:
        """Wait until everything is written, but not for long."""
        end_s = time.monotonic() + _LAST_LINES_S
        while self._waiting.unfinished_tasks and time.monotonic() < end_s:
            time.sleep(0.005)


class TextFormatter(logging.Formatter):
    """Lines for people; a request's id stands at the end of those about it, if they do not name it themselves."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802 - as above
        """Return the local time with its offset from UTC, such as 2026-01-31 09:00:00.123+01:00."""
        return datetime.fromtimestamp(record.created).astimezone().isoformat(" ", "milliseconds")

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
            "message": getattr(record, "summary", None) or record.getMessage(),
        }
        if getattr(record, "request_id", ""):
            line["request_id"] = record.request_id  # type: ignore[attr-defined] # our filter's
        line |= getattr(record, "facts", {})
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
