# SPDX-License-Identifier: Apache-2.0
"""The clients' options are the daemon's."""

from __future__ import annotations

import os

import pytest

from pvrd import client_api
from pvrd import options as daemon
from pvrd.bus_types import Fds, Reply
from pvrd.bus_values import V, plain
from pvrd.client_options import OPTIONS, options
from pvrd.errors import InvalidArgument, OutOfMemory

# All but those whose options are arguments of the clients' own.
TABLES: dict[str, dict[str, daemon.Option]] = {
    name: table
    for name, table in vars(daemon).items()
    if name.isupper() and name not in ("DEVICE", "PRIORITY", "LIST_JOBS", "TRACE")
}
KINDS = {"bool": "b", "float": "d", "str": "s", "strs": "as", "numbers": "a{ud}"}


@pytest.mark.parametrize("name", TABLES)
def test_each_option_of_the_daemon_can_be_given(name: str) -> None:
    for key, option in TABLES[name].items():
        wide = option.high >= 1 << 32
        assert OPTIONS[key] == (KINDS.get(option.kind) or ("t" if wide else "u")), key


def test_the_clients_have_no_others() -> None:
    assert set(OPTIONS) == {key for table in TABLES.values() for key in table}


def test_values_are_held_to_their_types() -> None:
    made = options({"kv": "q8", "top_p": 1, "seed": (1 << 64) - 1, "share": None})
    assert {key: value.signature for key, value in made.items()} == {
        "kv": "s", "top_p": "d", "seed": "t",
    }  # fmt: skip
    assert plain(made) == {"kv": "q8", "top_p": 1.0, "seed": (1 << 64) - 1}
    for wrong in (
        {"context": -1}, {"context": 1 << 32}, {"seed": 1 << 64}, {"temperature": 10**400},
        {"logit_bias": {-1: 1.0}}, {"logit_bias": {1 << 32: 1.0}}, {"logit_bias": {1: 10**400}},
    ):  # fmt: skip
        with pytest.raises(InvalidArgument, match="out of range"):
            options(wrong)
    for key, value, words in (
        ("context", 2.5, "a whole number"), ("context", "16", "a whole number"),
        ("top_p", "high", "a number"), ("top_p", [], "a number"), ("top5", 1, "true or false"),
        ("model", 5, "a text"), ("model", b"x", "a text"), ("stop", "x", "a list of texts"),
        ("stop", ["x", 5], "a list of texts"), ("stop", 5, "a list of texts"),
        ("logit_bias", [1], "token numbers with numbers"),
        ("logit_bias", {"x": 1}, "token numbers with numbers"),
    ):  # fmt: skip
        with pytest.raises(InvalidArgument, match=f"{key} has to be {words}"):
            options({key: value})
    assert plain(options({"stop": ("a", "b"), "logit_bias": {5: 1}})) == {
        "stop": ["a", "b"], "logit_bias": {5: 1.0},
    }  # fmt: skip
    with pytest.raises(InvalidArgument, match="there is no option colour"):
        options({"colour": "red"})


def test_an_answer_that_lost_its_descriptors() -> None:
    """The kernel leaves out what a process that has too many files open cannot take."""
    for call, body in (
        (client_api.hold("x"), [0]), (client_api.generate("x", {}), [0]),
        (client_api.open_video({}), ["/x", 0, 1, {}]),
        (client_api.upscale(0, {}), [0, {"result": V("h", 1)}]),
        (client_api.add_model(0, "x", {}), [{"progress": V("h", 0)}]),
    ):  # fmt: skip
        came = os.open(os.devnull, os.O_RDONLY)
        two = body[-1] == {} or len(body) == 2
        reply = Reply("", body, Fds([came] if two else []))
        if not two:
            os.close(came)
        with pytest.raises(OutOfMemory, match="too many files open"):
            call.read(reply)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(came)
