import socket

import pytest

from paceline.cli.ports import check_free, free_port
from paceline.core.errors import ConfigError


def test_free_ports_are_distinct_and_can_be_bound() -> None:
    ports = [free_port("127.0.0.1") for _ in range(20)]
    assert len(set(ports)) == 20
    with socket.create_server(("127.0.0.1", ports[0])):
        pass


def test_a_taken_port_is_named_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            check_free("grpc_port", "127.0.0.1", port)
    assert caught.value.message == (
        f"grpc_port={port}: cannot listen on 127.0.0.1: address already in use; "
        "choose with --grpc-port"
    )
    check_free("grpc_port", "127.0.0.1", port)


def test_an_address_that_is_not_of_this_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot assign requested address"):
        check_free("port", "192.0.2.1", 8000)
