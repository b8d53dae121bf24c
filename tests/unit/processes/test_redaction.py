"""What is planted as a secret is in no command line, log line, variable of the environment or value that is shown."""

from __future__ import annotations

import json
import string
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probing.daemon.processes.redaction import command_text, names_secret, redacted
from probing.daemon.python_stack.values.render import looks_secret

NAMES = (
    *("api_key", "apiKey", "OPENAI_API_KEY", "openai_key", "wandb_key", "HF_TOKEN", "hf_token", "hftoken", "db-passwd"),
    *("dbpassword", "pw", "user.pwd", "passphrase", "client_secret", "AWS_SECRET_ACCESS_KEY", "aws_session_token"),
    *("credentials", "x-api-key", "sessionCookie", "cookie", "auth", "API_KEY_2", "token_value", "logger.wandb.apiKey"),
)
# Behind a mark that no other text has, so that a part of it is found as well.
MARK = "QZX"
names = st.sampled_from(NAMES)
plain = st.text(string.ascii_letters + string.digits + "_-+/.,;!$%#*", max_size=40).map(lambda s: MARK + s + MARK)
anything = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=40).map(lambda s: MARK + s + MARK)
harmless = st.dictionaries(st.sampled_from(["lr", "sort_key", "steps", "model"]), st.integers(0, 99) | st.just("x"))


def hidden(text: str) -> bool:
    return MARK not in text


def nested(name: str, value: Any, other: dict[str, Any], depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {**other, name: value, "after": 1}
    for _ in range(depth):
        inner = {**other, "inner": [inner]}
    return inner


@given(names, plain, st.sampled_from(["--", "-"]))
def test_options(name: str, secret: str, dashes: str) -> None:
    option = dashes + name
    assert hidden(command_text(["train.py", option, secret, "--lr", "1"]))
    assert hidden(command_text(["train.py", f"{option}={secret}", "--lr", "1"]))
    assert hidden(redacted(f"started {option} {secret} --lr 1"))
    assert hidden(redacted(f"started {option}={secret} --lr 1"))


@given(names, anything)
def test_an_argument_is_hidden_whole(name: str, secret: str) -> None:
    assert hidden(command_text([f"--{name}={secret}"]))
    assert hidden(command_text([f"{name}={secret}"]))
    assert hidden(command_text([f"--{name}", secret])) or secret.startswith("--")


@given(names, anything, harmless, st.integers(0, 3), st.booleans(), st.booleans())
def test_json(name: str, secret: str, other: dict[str, Any], depth: int, ascii_only: bool, compact: bool) -> None:
    separators = (",", ":") if compact else None
    text = json.dumps(nested(name, secret, other, depth), ensure_ascii=ascii_only, separators=separators)
    for shown in (text, f"--config={text}", f"cfg:{text}"):
        assert hidden(command_text([shown]))
        assert hidden(redacted(f"loaded {shown} in 3 ms"))
    assert looks_secret(text)


@given(names, anything, harmless, st.integers(1, 3))
def test_json_in_json(name: str, secret: str, other: dict[str, Any], levels: int) -> None:
    text = json.dumps(nested(name, secret, other, 1))
    for _ in range(levels):
        text = json.dumps({"body": text, **other})
    assert hidden(command_text([text]))
    assert hidden(redacted(text))


@given(names, anything, harmless, st.integers(0, 3))
def test_literals_of_python(name: str, secret: str, other: dict[str, Any], depth: int) -> None:
    text = repr(nested(name, secret, other, depth))
    assert hidden(command_text([text]))
    assert hidden(redacted(f"args: {text}"))


@given(names, st.lists(plain, min_size=1, max_size=3))
def test_lists_of_secrets(name: str, secrets: list[str]) -> None:
    assert hidden(command_text([json.dumps({"lr": 1, name: secrets})]))
    assert hidden(command_text([json.dumps({"lr": 1, name: {"now": secrets}})]))


@given(plain, plain)
def test_headers(one: str, two: str) -> None:
    cookies = (f"Cookie: sid={one}; user={two}", f'Cookie: sid="{one}"; user={two}', f"Set-Cookie: {one}={two}; Path=/")
    for header in (*cookies, f"Authorization: Token {one} {two}"):
        assert hidden(command_text(["curl", "-H", header, "http://h"]))
        assert hidden(redacted(f"> {header}"))
        assert hidden(command_text([json.dumps({"headers": dict([header.split(": ", 1)]), "lr": 1})]))
    assert hidden(command_text(["curl", "--cookie", f"sid={one}; user={two}"]))


@given(plain)
def test_addresses(secret: str) -> None:
    text = quote(secret, safe="")
    assert hidden(command_text([f"postgres://me:{text}@host/db"]))
    assert hidden(redacted(f"GET https://host/a?x=1&token={text}&y=2"))
    assert hidden(command_text(["curl", "-u", f"me:{secret}"]))


@given(plain)
def test_a_password_behind_p(secret: str) -> None:
    assert hidden(command_text(["mysql", "-p", secret]))
    assert hidden(command_text(["mysql", f"-p{secret}"]))
    assert hidden(redacted(f"mysql -p {secret} -u me"))


@given(names)
def test_names_of_variables(name: str) -> None:
    assert names_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        *("tokens", "tokenizer", "max_tokens", "eos_token", "keyboard", "sort_key", "state_key", "rng_key", "key"),
        *("lr", "forward_pass", "author", "passed", "spwan", "monkey", "batch_size", "missing_keys"),
    ],
)
def test_names_of_no_secrets(name: str) -> None:
    assert not names_secret(name)
    assert command_text([f"--{name}", "v"]) == f"--{name} v"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["ssh", "-p", "2222", "host"], "ssh -p 2222 host"),
        (["docker", "-p", "80:8080"], "docker -p 80:8080"),
        (["x", "-p80", "-parallel"], "x -p80 -parallel"),
        (['{"api_key": "abc def", "lr": 1}'], '{"api_key": "***", "lr": 1}'),
        (['{"o": "{\\"token\\": \\"abc d\\"}", "lr": 1}'], '{"o": "{\\"token\\": \\"***\\"}", "lr": 1}'),
        (["curl", "-H", "Cookie: a=b; c=d"], "curl -H Cookie: ***"),
        (["a.py", "--url=http://h:80/?a=b&c=d", "x:y"], "a.py --url=http://h:80/?a=b&c=d x:y"),
    ],
)
def test_what_is_left(arguments: list[str], text: str) -> None:
    assert command_text(arguments) == text


@pytest.mark.parametrize(
    "unit", ["a", "a:", "password=", '"', "\\", " ", "x='", '\\"', "cookie:", "-p", "a_", "http://", "key", "token:\\"]
)
def test_work_is_bounded_by_what_is_shown(unit: str) -> None:
    """An argument is cut before it is looked at."""
    assert command_text([unit * 5000]) == command_text([(unit * 5000)[:2048]])
