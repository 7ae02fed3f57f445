"""Transport baselines between two processes: a raw socket, a gRPC message, Arrow Flight.

Each moves as many bytes, from one array into a fresh one, with nothing around it.
"""

import multiprocessing
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import grpc
import numpy as np
from google.protobuf.wrappers_pb2 import BytesValue

_FLIGHT_BATCH_BYTES = 1 << 20
_MESSAGE = "/plain.Bytes/Move"
_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
MOST_BYTES = 400 << 20


@dataclass(frozen=True)
class Way:
    """A method of moving bytes."""

    fetch: Callable[[int], object]
    """Takes a number of bytes from the other side."""
    push: Callable[[memoryview], object]
    """Sends bytes to the other side and waits until they have arrived."""


def _serve_socket(pipe: Connection) -> None:
    """Answer `<count>` with that many bytes, and discard the bytes that `-<count>` announces."""
    source = np.ones(MOST_BYTES, np.uint8)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        while True:
            peer, _ = listener.accept()
            with peer:
                count = int(peer.recv(20))
                if count >= 0:
                    peer.sendall(source.data[:count])
                else:
                    peer.sendall(b"+")
                    _receive(peer, -count)
                    peer.sendall(b"+")


def _receive(peer: socket.socket, count: int) -> None:
    view, position = np.empty(count, np.uint8).data, 0
    while position < count:
        position += peer.recv_into(view[position:])


def socket_way(port: int) -> Way:
    """Move bytes over a new connection each time."""

    def fetch(count: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as peer:
            peer.sendall(str(count).encode())
            _receive(peer, count)

    def push(source: memoryview) -> None:
        with socket.create_connection(("127.0.0.1", port)) as peer:
            peer.sendall(str(-source.nbytes).encode())
            peer.recv(1)
            peer.sendall(source)
            peer.recv(1)

    return Way(fetch, push)


def _serve_messages(pipe: Connection) -> None:
    """Answer a message that is a number with as many bytes, and any other with nothing."""
    from concurrent.futures import ThreadPoolExecutor

    source = np.ones(MOST_BYTES, np.uint8)

    def move(request: BytesValue, context: grpc.ServicerContext) -> BytesValue:
        if len(request.value) > 20:
            return BytesValue()
        return BytesValue(value=source[: int(request.value)].tobytes())

    handler = grpc.unary_unary_rpc_method_handler(move, BytesValue.FromString, BytesValue.SerializeToString)
    server = grpc.server(ThreadPoolExecutor(4), options=_OPTIONS)
    _, service, method = _MESSAGE.split("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    pipe.send(port)
    server.wait_for_termination()


def message_way(port: int) -> Way:
    """Move bytes in the `bytes` field of one message, as most gRPC services do."""
    channel = grpc.insecure_channel(f"127.0.0.1:{port}", _OPTIONS)
    move = channel.unary_unary(_MESSAGE, BytesValue.SerializeToString, BytesValue.FromString)

    def fetch(count: int) -> object:
        return np.frombuffer(move(BytesValue(value=str(count).encode())).value, np.uint8)

    return Way(fetch, lambda source: move(BytesValue(value=bytes(source))))


def _serve_flight(pipe: Connection) -> None:
    """Serve tables of bytes over Arrow Flight."""
    import pyarrow
    from pyarrow import flight

    source = pyarrow.array(np.ones(MOST_BYTES, np.uint8))

    class Server(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow ships no types
        def do_get(self, context: Any, ticket: Any) -> Any:
            table = pyarrow.table({"bytes": source.slice(0, int(ticket.ticket))})
            batches = table.to_batches(max_chunksize=_FLIGHT_BATCH_BYTES)
            return flight.GeneratorStream(table.schema, iter(batches))

        def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
            for chunk in reader:
                np.asarray(chunk.data.column(0))

    server = Server("grpc://127.0.0.1:0")
    pipe.send(server.port)
    server.serve()


def flight_way(port: int) -> Way:
    """Move bytes as record batches of 1 MB."""
    import pyarrow
    from pyarrow import flight

    client = flight.connect(f"grpc://127.0.0.1:{port}")

    def fetch(count: int) -> object:
        target, position = np.empty(count, np.uint8), 0
        for chunk in client.do_get(flight.Ticket(str(count).encode())):
            values = chunk.data.column(0).to_numpy()
            target[position : position + len(values)] = values
            position += len(values)
        return target

    def push(source: memoryview) -> None:
        table = pyarrow.table({"bytes": pyarrow.array(np.frombuffer(source, np.uint8))})
        writer, _ = client.do_put(flight.FlightDescriptor.for_path("x"), table.schema)
        writer.write_table(table, max_chunksize=_FLIGHT_BATCH_BYTES)
        writer.close()

    return Way(fetch, push)


_PEERS = {
    "socket": (_serve_socket, socket_way),
    "one gRPC message": (_serve_messages, message_way),
    "Arrow Flight": (_serve_flight, flight_way),
}


@contextmanager
def peers() -> Iterator[dict[str, Way]]:
    """Run the other end of each method in a separate process; yield the methods by name."""
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        ways = {}
        for name, (serve, make) in _PEERS.items():
            pipe, child = context.Pipe()
            process = context.Process(target=serve, args=(child,), daemon=True)
            process.start()
            stack.callback(process.join)
            stack.callback(process.terminate)
            ways[name] = make(pipe.recv())
        yield ways
