"""Handshake of ranks: both ends know the secret, or there is no channel."""

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

import pytest

from trocar_server.training.fit.ranks.rank_messages import decode, encode
from trocar_server.training.fit.ranks.rank_sockets import accept, address_of, connect, listen

WAIT_S = 20.0


def test_both_ends_get_a_channel() -> None:
    with listen("127.0.0.1") as listener, ThreadPoolExecutor(1) as thread:
        connecting = thread.submit(connect, address_of(listener), "secret", 3)
        accepted = accept(listener, "secret", WAIT_S)
        assert accepted is not None
        rank, first = accepted
        other: Connection = connecting.result(WAIT_S)
        first.send_bytes(encode("hello"))
        assert (rank, decode(other.recv_bytes())) == (3, "hello")
        first.close()
        with pytest.raises(EOFError):
            other.recv_bytes()
        other.close()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux has this option")
def test_a_node_that_vanishes_while_something_is_sent_to_it_is_noticed_as_soon() -> None:
    """Linux asks a silent node nothing while it owes an acknowledgement, and would send again for minutes."""
    with listen("127.0.0.1") as listener, ThreadPoolExecutor(1) as thread:
        connecting = thread.submit(connect, address_of(listener), "secret", 1)
        accepted = accept(listener, "secret", WAIT_S)
        assert accepted is not None
        for channel in (accepted[1], connecting.result(WAIT_S)):
            with channel, socket.socket(fileno=os.dup(channel.fileno())) as wire:
                assert wire.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 25_000


def test_a_rank_without_the_secret_is_turned_away() -> None:
    with listen("127.0.0.1") as listener, ThreadPoolExecutor(1) as thread:
        connecting = thread.submit(connect, address_of(listener), "guess", 1)
        assert accept(listener, "secret", WAIT_S) is None
        with pytest.raises(ConnectionError):
            connecting.result(WAIT_S)


def test_rank_0_has_to_know_the_secret_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend() -> None:
            wire, _ = listener.accept()
            with wire:
                wire.sendall(bytes(32))
                wire.recv(4 + 32)
                wire.recv(32)
                wire.sendall(bytes(32))

        pretender = threading.Thread(target=pretend)
        pretender.start()
        with pytest.raises(ConnectionRefusedError, match="does not know the secret"):
            connect(address_of(listener), "secret", 1)
        pretender.join()


def test_a_stranger_who_says_nothing_or_leaves_does_not_stop_the_others() -> None:
    with listen("127.0.0.1") as listener, ThreadPoolExecutor(1) as thread:
        socket.create_connection(listener.getsockname()).close()
        assert accept(listener, "secret", WAIT_S) is None
        connecting = thread.submit(connect, address_of(listener), "secret", 1)
        accepted = accept(listener, "secret", WAIT_S)
        assert accepted is not None
        accepted[1].close()
        connecting.result(WAIT_S).close()
