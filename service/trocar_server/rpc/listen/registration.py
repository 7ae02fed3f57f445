"""Method registration: the handlers of a service, generic and by name.

register(server, trainer_pb2.DESCRIPTOR.services_by_name["TrainerService"], TrainerService(trainers))
"""

from typing import Any, Protocol, TypeAlias, runtime_checkable

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

# Note: [One registration per service]
# gRPC looks a method up among the registered handlers first, then among the generic ones in the order in
# which they were added. grpc.aio 1.81 ignores `add_registered_method_handlers`, 1.85 obeys it. A generated
# `add_*Servicer_to_server` beside a generic handler of the same service then took over its methods, and with
# them its codec: `Train`, which reads bytes, got messages. Hence no service of ours uses the generated
# functions: every method is added here, once, with the same handler registered both ways.

_KINDS = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


@runtime_checkable
class HasOwnHandlers(Protocol):
    """A servicer with methods that have their own codec."""

    def own_handlers(self) -> dict[str, Handler]:
        """Handlers by method name."""
        ...


def register(server: grpc.aio.Server, service: ServiceDescriptor, servicer: Any) -> None:
    """Add every method of a service to a server that has not started.

    Args:
        server: The server.
        service: The service's descriptor.
        servicer: Has a method of the same name for each that is not among its `own_handlers`.

    Raises:
        ValueError: An own handler is for a method that the service lacks.
    """
    own = servicer.own_handlers() if isinstance(servicer, HasOwnHandlers) else {}
    if unknown := sorted(own.keys() - service.methods_by_name.keys()):
        raise ValueError(f"{service.full_name} has no method {', '.join(unknown)}")
    handlers = {
        name: own.get(name) or protobuf_handler(method, getattr(servicer, name))
        for name, method in service.methods_by_name.items()
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))
    server.add_registered_method_handlers(service.full_name, handlers)


def protobuf_handler(method: MethodDescriptor, behaviour: Any) -> Handler:
    """Handler of a method with protobuf's own codec, as in generated code."""
    return _KINDS[method.client_streaming, method.server_streaming](
        behaviour,
        request_deserializer=message_factory.GetMessageClass(method.input_type).FromString,
        response_serializer=message_factory.GetMessageClass(method.output_type).SerializeToString,
    )
