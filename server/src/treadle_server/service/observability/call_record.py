"""What is known of an RPC: gathered while it runs, told to the log, the metrics and the traces when it has ended."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final

from treadle_server.engine.events import Timings
from treadle_server.engine.sequence import ActiveRequest
from treadle_server.errors import NonFiniteLogitsError, StageError, TreadleError
from treadle_server.language_model import Generation, LanguageModel

REQUEST_ID_KEY: Final = "x-request-id"
# What a client may call its request: it goes into logs and answers as it is.
_SANE_ID: Final = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


@dataclass(slots=True, kw_only=True)
class CallRecord:
    """One RPC. Nothing in it is text of a prompt, of an answer, or a secret.

    Attributes:
        request_id: the client's name for it, or one drawn here.
        method: Service/Method, without the package.
        client: who calls: a token's name, a certificate's subject, or an address; empty until that is known.
        role: what the caller may do: user or admin; empty until that is known.
        model: name of the served model that it uses; empty until that is known.
        num_prompt_tokens: tokens of its prompt, once that is encoded.
        generates_text: whether it is a generation, perhaps one that was refused.
        generation: what it generates, once that has been let in.
        code: name of the gRPC status that it ended with.
        reason: the stable reason of an error.
        figures: of a training call: step, loss, grad_norm, lr, num_tokens, as far as it has them.
        stage: the plugin and the stage that failed, where one did.
        started_s: when it came, in seconds of the monotonic clock.
        started_ns: the same as Unix time.
        duration_s: how long it took.
        trace_id: of the trace that it is in; empty for none.
    """

    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    method: str = ""
    client: str = ""
    role: str = ""
    model: str = ""
    adapter: str = ""
    adapter_version: int = 0
    weight_version: int = 0
    num_prompt_tokens: int | None = None
    generates_text: bool = False
    generation: Generation | None = None
    code: str = "OK"
    reason: str = ""
    stage: tuple[str, str] | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    started_s: float = field(default_factory=time.monotonic)
    started_ns: int = field(default_factory=time.time_ns)
    duration_s: float = 0.0
    trace_id: str = ""

    def uses(self, model: LanguageModel) -> LanguageModel:
        """Note the model, and return it."""
        self.model = model.name
        return model

    def generates(self, generation: Generation) -> None:
        """Note the generation and what it is made with."""
        info = generation.info
        self.generation = generation
        self.weight_version, self.num_prompt_tokens = info.weight_version, len(info.prompt_ids)
        self.adapter, self.adapter_version = info.adapter, info.adapter_version

    def scores(self, scoring: ActiveRequest) -> None:
        """Note what a prompt is scored with."""
        request = scoring.request
        self.weight_version, self.num_prompt_tokens = scoring.weight_version, len(request.prompt_ids)
        self.adapter = "" if request.adapter is None else request.adapter.name
        self.adapter_version = request.adapter_version

    def failed(self, error: TreadleError, reason: str) -> None:
        """Note the error that ends it, and the stable reason that goes with it."""
        self.reason = reason
        if isinstance(error, StageError):
            self.stage = error.plugin, error.stage

    def naming_weights(self, error: TreadleError) -> TreadleError:
        """Return the error that the client gets: of logits that are not finite it says whose they are."""
        if not isinstance(error, NonFiniteLogitsError) or not self.model:
            return error
        version = f", weight version {self.weight_version}" if self.weight_version else ""
        return NonFiniteLogitsError(f"{error} (model {self.model!r}{version})")

    @property
    def num_generated_tokens(self) -> int | None:
        """Tokens of all choices; None where nothing is generated."""
        return None if self.generation is None else self.generation.num_generated_tokens

    @property
    def finish_reasons(self) -> tuple[str, ...]:
        """Why choices ended, in lower case, by index."""
        finishes = () if self.generation is None else self.generation.finishes
        return tuple(f.reason.name.lower() for f in sorted(finishes, key=lambda finish: finish.index))

    @property
    def timings(self) -> Timings | None:
        """Waiting, prefill and decode; None where nothing is generated."""
        return None if self.generation is None else self.generation.timings


_CURRENT: Final[ContextVar[CallRecord]] = ContextVar("treadle_call")


def current_call() -> CallRecord:
    """Return the record of the RPC that this code runs for; outside of one a record that nobody reads."""
    return _CURRENT.get(None) or CallRecord()


def current_request_id() -> str:
    """Return the id of the RPC that this code runs for; empty outside of one."""
    record = _CURRENT.get(None)
    return "" if record is None else record.request_id


def make_current(record: CallRecord) -> None:
    """Let the code that runs in this task, and what it calls, find the record."""
    _CURRENT.set(record)


def sane_request_id(text: object) -> str:
    """Return an id that a client gave, or a new one in place of what is no sane id."""
    if isinstance(text, str) and _SANE_ID.fullmatch(text):
        return text
    return uuid.uuid4().hex
