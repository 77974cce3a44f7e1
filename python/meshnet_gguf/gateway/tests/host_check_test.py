"""Which names a gateway answers to."""

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st
from meshnet_gguf.gateway import AllowedHosts
from meshnet_gguf.gateway._failures import RequestError

LOOPBACK = AllowedHosts.listening_on("127.0.0.1")
ANYWHERE = AllowedHosts.listening_on("0.0.0.0", ["Models.Example.Org"])


@pytest.mark.parametrize(
    "authority",
    ["127.0.0.1", "127.0.0.1:1", "localhost", "LocalHost:80", "localhost.", "[::1]", "[::1]:8080"],
)
def test_loopback(authority: str) -> None:
    assert LOOPBACK.allow(authority)
    assert ANYWHERE.allow(authority)


@pytest.mark.parametrize(
    "authority",
    [
        "",
        "evil.example",
        "localhost.evil.example",
        "localhost@evil.example",
        "evil.example@localhost",
        "localhost:80:80",
        "localhost:x",
        "localhost/",
        " localhost",
        "localhost\n",
        "[evil.example]",
        "::1",
        "[::1",
    ],
)
def test_what_no_gateway_answers_to(authority: str) -> None:
    assert not LOOPBACK.allow(authority)
    assert not ANYWHERE.allow(authority)


def test_the_address_that_it_is_bound_to() -> None:
    bound = AllowedHosts.listening_on("192.0.2.7")
    assert bound.allow("192.0.2.7:8080")
    assert bound.allow(f"{socket.gethostname()}:8080")
    assert not bound.allow("192.0.2.8:8080")
    assert not LOOPBACK.allow("192.0.2.7")


def test_every_address_of_a_gateway_that_is_bound_to_all() -> None:
    for authority in (
        "192.0.2.8:80",
        "[2001:db8::1]:80",
        "models.example.org",
        "models.example.org.",
    ):
        assert ANYWHERE.allow(authority)
    assert not ANYWHERE.allow("example.org")
    assert AllowedHosts.listening_on("::").allow("[2001:db8::1]")


@given(st.from_regex(r"[a-z0-9-]{1,20}(\.[a-z0-9-]{1,20}){0,2}\.example", fullmatch=True))
def test_no_name_that_nobody_has_given(name: str) -> None:
    for hosts in (LOOPBACK, ANYWHERE):
        for host, origin in ((name, ""), ("localhost", f"https://{name}:8080")):
            with pytest.raises(RequestError) as refused:
                hosts.check([host], [origin] if origin else [])
            assert (refused.value.reason_name, refused.value.status) == ("NOT_SERVED", 403)


@given(st.text(max_size=40))
def test_any_text_is_allowed_or_refused(text: str) -> None:
    assert LOOPBACK.allow(text) in (True, False)
