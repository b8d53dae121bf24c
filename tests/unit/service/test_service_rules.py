"""Who may listen where, and what an error is on the wire."""

from __future__ import annotations

import pickle

import grpc
import pytest

from probing.api import errors
from probing.api.proto.probing.v1 import node_pb2 as pb
from probing.api.wire import from_proto
from probing.daemon.ipc import error_of
from probing.daemon.service.auth import check_listen
from probing.daemon.service.errors import status_of, to_proto
from probing.daemon.service.messages import stacks_reply, status_fields
from probing.daemon.stack_wire import ProcessStacks, join_stacks, split_stacks


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1"])
def test_loopback_may_be_in_the_clear_with_a_token(address: str) -> None:
    check_listen(address, token_file="/t", insecure=False)
    with pytest.raises(errors.ConfigError, match="everybody") as caught:
        check_listen(address, token_file="", insecure=False)
    assert "token_file" in caught.value.hint
    check_listen(address, token_file="", insecure=True)


@pytest.mark.parametrize("address", ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "example.org:1", "localhost.evil:1", ":1"])
def test_other_addresses_may_not_unless_allowed(address: str) -> None:
    with pytest.raises(errors.ConfigError) as caught:
        check_listen(address, token_file="/t", insecure=False)
    assert "insecure = true" in caught.value.hint
    check_listen(address, token_file="", insecure=True)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.QueryTimeout("x"), grpc.StatusCode.DEADLINE_EXCEEDED),
        (errors.QueryMemory("x"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (errors.QueryRejected("x"), grpc.StatusCode.INVALID_ARGUMENT),
        (errors.ProcessGone("x"), grpc.StatusCode.NOT_FOUND),
        (errors.NotPython("x"), grpc.StatusCode.FAILED_PRECONDITION),
        (errors.PeerError("x"), grpc.StatusCode.UNAVAILABLE),
        (errors.InternalError("x"), grpc.StatusCode.INTERNAL),
        (errors.Overloaded("x"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (errors.Unauthenticated("x"), grpc.StatusCode.UNAUTHENTICATED),
        (errors.PrivilegeError("x"), grpc.StatusCode.PERMISSION_DENIED),
        (errors.ProbingError("x"), grpc.StatusCode.INTERNAL),
    ],
)
def test_each_error_has_a_status(error: errors.ProbingError, code: grpc.StatusCode) -> None:
    assert status_of(error) is code


def test_an_error_on_the_wire_is_bounded_lines() -> None:
    sent = to_proto(errors.QueryError("a\nb " * 10_000, hint="c\r\nd"))
    assert len(sent.message) <= 2000
    assert "\n" not in sent.message
    assert sent.hint == "c d"


def test_an_error_keeps_its_code_and_reason_and_that_of_an_older_node_has_none() -> None:
    error = errors.PeerError("n1 does not answer: no answer in time", code=errors.LATE, reason="no answer in time")
    for copy in (from_proto(to_proto(error)), pickle.loads(pickle.dumps(error))):
        assert (copy.kind, copy.message, copy.hint) == (error.kind, error.message, error.hint)
        assert (copy.code, copy.reason) == (errors.LATE, "no answer in time")
    old = from_proto(pb.Error(kind="PeerError", message="n1 does not answer"))
    assert (old.code, old.reason) == ("", "n1 does not answer")
    assert error_of(errors.QueryMemory("x", code=errors.TOO_LARGE).to_dict()).code == errors.TOO_LARGE


def test_answers_that_make_no_sense_are_internal_errors() -> None:
    threads = ("1", "[{}]", '[{"tid": "x", "frames": []}]')
    texts = ["", "[]", "{}", "1", "[" * 9999, *(f'{{"threads": {t}}}' for t in threads)]
    spoilt = [join_stacks([ProcessStacks("j", "r", 0, 7, 1, 7, text.encode())], []) for text in texts]
    indices = ("", "1", "{}", "[" * 9999, '{"processes": 1, "failures": []}', '{"processes": [["x"]], "failures": []}')
    answers = [({"index": len(index)}, index.encode()) for index in indices]
    foreign = join_stacks([ProcessStacks("j", "r", 0, "x", 1, 7, b'{"threads": [{"tid": 1, "frames": []}]}')], [])
    for header, payload in (({}, b""), ({"index": "x"}, b""), *answers, *spoilt, foreign, join_stacks([], [{}])):
        with pytest.raises(errors.InternalError):
            stacks_reply("n0", *split_stacks(header, payload))
    with pytest.raises(errors.InternalError):
        status_fields({"store_bytes": -1})
    assert status_fields({"state": "running", "unknown": 1}).state == "running"
