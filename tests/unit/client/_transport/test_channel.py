import pytest

import trocar
from trocar._transport.channel import ConnectOptions, channel_options, is_loopback


@pytest.mark.parametrize(
    "target",
    [
        "localhost:50051",
        "127.0.0.1:1",
        "127.3.2.1",
        "[::1]:50051",
        "unix:/run/trocar.sock",
        "dns:///localhost:50051",
        "ipv4:127.0.0.1:50051",
        "ipv6:[::1]:50051",
    ],
)
def test_this_machine_is_recognised(target: str) -> None:
    assert is_loopback(target)


@pytest.mark.parametrize(
    "target",
    [
        "gpu-1:50051",
        "10.0.0.1:1",
        "127.evil.example:1",
        "localhost.evil:1",
        "ipv4:127.0.0.1:1,10.0.0.1:1",
        "",
    ],
)
def test_other_machines_are_not_this_one(target: str) -> None:
    assert not is_loopback(target)


def test_a_token_never_crosses_a_network_in_plain_text() -> None:
    with pytest.raises(ValueError, match="tls"):
        trocar.connect("gpu-1:50051", token="secret")
    trocar.connect("gpu-1:50051", token="secret", tls=True).close()


@pytest.mark.parametrize("address", ["", "  "])
def test_an_empty_address_is_refused_before_any_call(address: str) -> None:
    with pytest.raises(ValueError, match="write host:port"):
        trocar.connect(address)


@pytest.mark.parametrize("token", ["secret\n", "caf\u00e9", "a\x00b"])
def test_a_token_that_no_header_may_have_is_refused_without_showing_it(token: str) -> None:
    with pytest.raises(ValueError, match="the token has characters") as caught:
        trocar.connect("localhost:50051", token=token)
    assert token.strip() not in str(caught.value)


def test_a_missing_certificate_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.pem"):
        trocar.connect("gpu-1:50051", tls=trocar.TlsOptions(ca="nowhere.pem"))


def test_no_retries_means_no_retry_policy() -> None:
    options = ConnectOptions("localhost:1", 60.0, None, None, retries=0)
    assert "grpc.service_config" not in dict(channel_options(options))
