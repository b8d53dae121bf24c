"""Spans, events, metrics and steps that a job reports, as rows in shared memory (``rows``).

``span`` writes a row when the span begins and another row when it ends, so that a job that hangs shows where it is.
"""

from __future__ import annotations

import contextvars
import functools
import itertools
import json
import os
import threading
import time
from typing import TYPE_CHECKING, Any, Callable, TypeVar, cast

from probing.rows import LONG, NO_INTEGER, NO_TEXT, SHORT, FixedTable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from probing.rows import Column

__all__ = ("METRICS", "TRACE", "attach_training_phases", "event", "is_enabled", "metric", "phase", "span", "step")

_F = TypeVar("_F", bound=Callable[..., Any])
SPAN_START, SPAN_END, EVENT = range(3)
# The columns of python.trace_event, in the order of the table; record_type is one of the three numbers above.
TRACE: list[Column] = [
    *((name, "i64", 8) for name in ("record_type", "trace_id", "span_id", "parent_id", "time", "thread_id")),
    *((name, "text", size) for name, size in (("name", SHORT), ("phase", SHORT), ("location", SHORT))),
    *((name, "text", LONG) for name in ("attributes", "event_attributes")),
]
METRICS: list[Column] = [("step", "i64", 8), ("value", "f64", 8), ("name", "text", SHORT)]
_PHASES = {"forward": "forward", "backward": "backward", "optimizer": "optimizer", "step": "optimizer"}
_trace = FixedTable("trace_event", TRACE)
_metrics = FixedTable("training_metrics", METRICS)
# Each process counts ids from a random number, so the chance that two processes of a job use equal ids is
# one in some billions.
_ids = itertools.count(int.from_bytes(os.urandom(7), "little"))
_current: contextvars.ContextVar[_Span | None] = contextvars.ContextVar("probing_span", default=None)


def _encoded(text: str | None) -> bytes:
    return NO_TEXT if text is None else text.encode(errors="replace")


def _json(value: Any) -> bytes:
    return json.dumps(value, default=str).encode() if value else NO_TEXT


class _Span:
    """A span that runs between ``__enter__`` and ``__exit__``."""

    __slots__ = ("_attributes", "_location", "_name", "_parent", "_phase", "phase", "span_id", "trace_id")

    def __init__(self, name: str, phase: str | None, location: str | None, attributes: Mapping[str, Any]) -> None:
        self.phase = phase
        self.span_id = self.trace_id = 0
        self._name, self._phase, self._location = _encoded(name), _encoded(phase), _encoded(location)
        self._attributes = _json(attributes)
        self._parent: _Span | None = None

    def __enter__(self) -> _Span:
        parent = self._parent = _current.get()
        self.span_id = next(_ids)
        self.trace_id = self.span_id if parent is None else parent.trace_id
        _current.set(self)
        self._write(SPAN_START, self._attributes, NO_TEXT)
        return self

    def __exit__(self, *_: object) -> None:
        _current.set(self._parent)
        self._write(SPAN_END, NO_TEXT, NO_TEXT)

    def add_event(self, name: str, attributes: Mapping[str, Any] | Iterable[Any] | None = None) -> None:
        """Writes an event that belongs to this span."""
        self._write(EVENT, NO_TEXT, _json(attributes), _encoded(name))

    def _write(self, record: int, attributes: bytes, of_event: bytes, name: bytes | None = None) -> None:
        _trace.write(
            record,
            self.trace_id,
            self.span_id,
            NO_INTEGER if self._parent is None else self._parent.span_id,
            time.time_ns(),
            threading.get_native_id(),
            self._name if name is None else name,
            self._phase,
            self._location,
            attributes,
            of_event,
        )


class _Handle:
    """The result of ``span``: a context manager and a decorator. Each entry begins a new span."""

    __slots__ = ("_arguments",)

    def __init__(self, *arguments: Any) -> None:
        self._arguments = arguments

    def __enter__(self) -> _Span:
        return _Span(*self._arguments).__enter__()

    def __exit__(self, *_: object) -> None:
        # Several spans may run in one handle: the innermost span of this thread or task ends.
        if (entered := _current.get()) is not None:
            entered.__exit__()

    def __call__(self, function: _F) -> _F:
        @functools.wraps(function)
        def inside(*arguments: Any, **named: Any) -> Any:
            with _Span(*self._arguments):
                return function(*arguments, **named)

        return cast(_F, inside)


def span(
    name: str | Callable[..., Any] | None = None,
    *,
    phase: str | None = None,
    location: str | None = None,
    **attributes: Any,
) -> Any:
    """Returns a span, for ``with`` or as a decorator: ``span("forward")``, ``@span("load")``, ``@span``.

    ``phase``: forward, backward or optimizer; spans with these names need no ``phase``. Without name and phase the
    result is only a decorator, and the span gets the name of the function.
    """
    if callable(name):
        return span(name.__name__, phase=phase, location=location, **attributes)(name)
    title = name if name is not None else phase
    if title is None:
        return lambda function: span(function, location=location, **attributes)
    kind = _PHASES.get((phase if phase is not None else title).rpartition(".")[2].lower())
    attributes.pop("source", None)
    return _Handle(title, kind, location, attributes)


def event(name: str, *, attributes: Mapping[str, Any] | Iterable[Any] | None = None) -> None:
    """Writes an event of the current span, or an event without a span if no span runs."""
    current = _current.get()
    (_Span(name, None, None, {}) if current is None else current).add_event(name, attributes)


def phase() -> str:
    """Returns the current training phase: forward, backward, optimizer or idle."""
    current = _current.get()
    return "idle" if current is None or current.phase is None else current.phase


def metric(name: str, value: float, *, step: int | None = None) -> None:
    """Writes a metric of the training job, such as its loss, at ``step``. None: the current step."""
    at = _step.micro_step if step is None else step
    _metrics.write(NO_INTEGER if at is None else at, float(value), name.encode(errors="replace"))


class _Step:
    """``step(n)``: step ``n`` begins here. ``step()``: the next step begins. ``micro_step``: the current step."""

    def __init__(self) -> None:
        self.micro_step: int | None = None
        self.micro_batches = 1

    def __call__(self, number: int | None = None, *, micro_batches: int | None = None) -> None:
        if micro_batches is not None:
            self.micro_batches = micro_batches
            if number is None:
                return
        before = -1 if self.micro_step is None else self.micro_step
        self.micro_step = before + 1 if number is None else int(number)
        _metrics.write(self.micro_step, float("nan"), b"step")


step = _step = _Step()


def is_enabled() -> bool:
    """Returns whether rows are written; False if the system has no memory files (memfd), or none could be created."""
    return bool(_trace.works)


def attach_training_phases(model: Any, optimizer: Any) -> None:
    """Makes torch report forward, backward and optimizer as spans, and each call of the optimizer as a step.

    Uses the public hooks of ``torch.nn.Module`` and ``torch.optim.Optimizer``.
    """
    running: dict[str, _Span] = {}

    def begin(what: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if what not in running:
                running[what] = _Span(what, what, None, {}).__enter__()

        return hook

    def end(what: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if (entered := running.pop(what, None)) is not None:
                entered.__exit__()
            if what == "optimizer":
                step()

        return hook

    model.register_forward_pre_hook(begin("forward"))
    model.register_forward_hook(end("forward"))
    model.register_full_backward_pre_hook(begin("backward"))
    model.register_full_backward_hook(end("backward"))
    optimizer.register_step_pre_hook(begin("optimizer"))
    optimizer.register_step_post_hook(end("optimizer"))
