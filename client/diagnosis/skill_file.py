"""Reads a skill of Probing: a YAML file with SQL steps, and rules about the rows of the steps."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from probing.api.errors import FormatError, UsageError
from probing.api.text import size, sql_text

__all__ = ("Parameter", "Rule", "Skill", "Step", "load_skill", "templated", "values_of")

_MOST_BYTES = 256 << 10
_MOST_ENTRIES = 256
_HINT = "a skill is a file of apiVersion probing.dev/v1 and kind Skill, with steps in its spec"
_KINDS: dict[str, tuple[type, ...]] = {"integer": (int,), "number": (int, float), "boolean": (bool,), "string": (str,)}
_NAME = re.compile(r"\w{1,64}", re.ASCII)
_CHOICE = re.compile(r"\{(\w+) \? ([\w.]*) : ([\w.]*)\}", re.ASCII)
# The names by which templates refer to tables; if use_global is true, `global.` stands before the table's name.
_TABLES = {
    "comm_table": "python.comm_collective",
    "table_comm": "python.comm_collective",
    "nccl_proxy_table": "nccl.proxy_ops",
    "nccl_coll_table": "nccl.coll_perf",
    "nccl_inflight_table": "nccl.inflight_ops",
    "net_qp_table": "nccl.net_qp",
    "nccl_counters_table": "nccl.profiler_counters",
    "fr_table": "python.torch_nccl_flight_record",
    "fr_status_table": "python.torch_nccl_pg_status",
    "global_prefix": "",
}
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a skill. ``kind``: integer, number, boolean or string."""

    name: str
    kind: str
    default: str


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a skill. ``kind``: only steps of kind sql are run. ``on_empty``: skip, warn or abort. ``when``: the
    condition of the step; if it is empty, the step is always run.
    """

    id: str
    title: str
    kind: str
    sql: str
    on_empty: str
    empty_message: str
    when: str


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of a skill. ``when``: a condition that ``skill`` reads. ``severity``: error, warning or info."""

    id: str
    when: str
    severity: str
    message: str


@dataclass(frozen=True, slots=True)
class Skill:
    """A skill. ``variables``: templates by name. ``any_tables``: the skill needs one of these tables."""

    id: str
    title: str
    docs: str
    parameters: tuple[Parameter, ...]
    steps: tuple[Step, ...]
    rules: tuple[Rule, ...]
    variables: Mapping[str, str]
    any_tables: tuple[str, ...]
    summary: str
    next_steps: tuple[str, ...]


def load_skill(path: Path) -> Skill:
    """Returns the skill in a file. Raises UsageError if it cannot be read, FormatError if it is not a skill."""
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as e:
        raise UsageError(f"cannot read the skill {path}: {e.strerror}", hint="give a YAML file") from None
    if len(data) > _MOST_BYTES:
        raise _wrong(path, f"it has more than {size(_MOST_BYTES)}")
    try:
        return _skill(_parsed(data))
    except _Wrong as e:
        raise _wrong(path, str(e)) from None


class _Wrong(Exception):
    """A field is missing or has the wrong type."""


def _wrong(path: Path, problem: str) -> FormatError:
    return FormatError(f"{path} is not a skill: {problem}", hint=_HINT)


def _parsed(data: bytes) -> Any:
    import yaml

    try:
        text = data.decode()
        # Nested aliases would let a small file become a large value.
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            raise _Wrong("it uses aliases")
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as e:
        line = "" if e.problem_mark is None else f", line {e.problem_mark.line + 1}"
        raise _Wrong(f"{e.problem or 'it is not YAML'}{line}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError):
        raise _Wrong("it is not YAML") from None


def _skill(found: Any) -> Skill:
    top = _mapping(found, "the file")
    if (top.get("apiVersion"), top.get("kind")) != ("probing.dev/v1", "Skill"):
        raise _Wrong(f"its apiVersion and kind are {top.get('apiVersion')!r:.40} and {top.get('kind')!r:.40}")
    meta, spec = _mapping(top.get("metadata"), "metadata"), _mapping(top.get("spec"), "spec")
    rules = _mapping(spec.get("interpretation") or {}, "interpretation")
    skill = Skill(
        id=_text(meta, "id"),
        title=_text(meta, "title_en", "") or _text(meta, "title"),
        docs=_text(meta, "docs", ""),
        parameters=_each(spec, "parameters", _parameter),
        steps=_each(spec, "steps", _step),
        rules=_each(rules, "rules", _rule),
        variables={str(k): str(v) for k, v in _mapping(spec.get("variables") or {}, "variables").items()},
        any_tables=_each(_mapping(spec.get("requires") or {}, "requires"), "any_tables", str),
        summary=_text(spec, "summary_template", ""),
        next_steps=_each(spec, "next_steps", str),
    )
    if not skill.steps:
        raise _Wrong("it has no steps")
    for name, ids in (
        ("step", [step.id for step in skill.steps]),
        ("rule", [rule.id for rule in skill.rules]),
        ("parameter", [one.name for one in skill.parameters]),
    ):
        if double := next((one for one in ids if ids.count(one) > 1), None):
            raise _Wrong(f"{name} {double!r:.80} occurs twice")
    return skill


def _parameter(found: Any) -> Parameter:
    own = _mapping(found, "a parameter")
    name, kind = _text(own, "name"), _text(own, "type")
    if not _NAME.fullmatch(name):
        raise _Wrong(f"{name!r:.80} is not a parameter name")
    if kind not in _KINDS:
        raise _Wrong(f"parameter {name} is of type {kind!r:.40}, not {', '.join(_KINDS)}")
    default = own.get("default")
    if not isinstance(default, _KINDS[kind]) or (kind != "boolean" and isinstance(default, bool)):
        raise _Wrong(f"the default of parameter {name} is not of type {kind}")
    return Parameter(name, kind, str(default).lower() if kind == "boolean" else str(default))


def _step(found: Any) -> Step:
    own = _mapping(found, "a step")
    step = Step(
        _text(own, "id"),
        _text(own, "title"),
        _text(own, "type", "sql"),
        _text(own, "sql", ""),
        _text(own, "on_empty", "skip"),
        _text(own, "empty_message", "").strip(),
        _text(own, "when", "").strip(),
    )
    if step.kind == "sql" and not step.sql.strip():
        raise _Wrong(f"step {step.id} has no sql")
    if step.on_empty not in ("skip", "warn", "abort"):
        raise _Wrong(f"on_empty of step {step.id} is {step.on_empty!r:.40}, not skip, warn or abort")
    return step


def _rule(found: Any) -> Rule:
    own = _mapping(found, "a rule")
    rule = Rule(_text(own, "id"), _text(own, "when"), _text(own, "severity", "info"), _text(own, "message"))
    if rule.severity not in ("error", "warning", "info"):
        raise _Wrong(f"severity of rule {rule.id} is {rule.severity!r:.40}, not error, warning or info")
    return rule


def _mapping(found: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(found, dict):
        raise _Wrong(f"{what} is not a mapping")
    return found


def _text(own: Mapping[str, Any], name: str, default: str | None = None) -> str:
    value = own.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise _Wrong(f"{name} is missing or not text")
    return str(value)


def _each(own: Mapping[str, Any], name: str, read: Callable[[Any], _T]) -> tuple[_T, ...]:
    found = own.get(name) or []
    if not isinstance(found, list) or len(found) > _MOST_ENTRIES:
        raise _Wrong(f"{name} is not a list of at most {_MOST_ENTRIES} entries")
    return tuple(read(entry) for entry in found)


def values_of(skill: Skill, given: Mapping[str, str], *, everywhere: bool) -> dict[str, str]:
    """Returns, by name, the values for the templates of ``skill``. ``given``: parameters that are set; ``everywhere``:
    the default of use_global, which asks all nodes. Raises UsageError for an unknown parameter or a value of another
    type.
    """
    known = {parameter.name: parameter for parameter in skill.parameters}
    for name, value in given.items():
        if name not in known:
            hint = f"its parameters: {', '.join(known) or 'none'}"
            raise UsageError(f"the skill {skill.id} has no parameter {name}", hint=hint)
        _check(known[name], value)
    found = {"use_global": str(everywhere).lower()}
    # The default use_global = true is ignored, because ``everywhere`` says whether there are several nodes to ask.
    found |= {one.name: one.default for one in skill.parameters if one.name != "use_global" or one.default == "false"}
    found |= given
    prefix = "global." if found["use_global"] == "true" else ""
    found |= {name: prefix + table for name, table in _TABLES.items()}
    # Templates put text parameters between quotes.
    quoted = {name for name, parameter in known.items() if parameter.kind == "string"}
    found = {name: sql_text(value)[1:-1] if name in quoted else value for name, value in found.items()}
    for name, template in skill.variables.items():
        found[name] = templated(_CHOICE.sub(lambda m: m[2] if found.get(m[1]) == "true" else m[3], template), found)
    return found


def _check(parameter: Parameter, value: str) -> None:
    patterns = {"integer": r"-?\d{1,18}", "number": r"-?\d{1,18}(\.\d{1,18})?", "boolean": "true|false"}
    if parameter.kind in patterns and not re.fullmatch(patterns[parameter.kind], value, re.ASCII):
        hint = f"its type is {parameter.kind}"
        raise UsageError(f"{value} is not a value of the parameter {parameter.name}", hint=hint)


def templated(template: str, values: Mapping[str, str]) -> str:
    """Returns ``template`` with each ``{name}`` replaced; a name without a value stays."""
    return re.sub(r"\{([\w.]+)\}", lambda match: values.get(match[1], match[0]), template, flags=re.ASCII)
