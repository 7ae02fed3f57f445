"""Session with a Ray cluster: one of its own for as long as it lasts, or one that runs already.

with open_session("local"):
    ...
"""

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError, first_line

LOCAL = "local"
AUTO = "auto"
NAMESPACE = "trocar"
_CONNECT_S = 5.0
_OBJECT_STORE_BYTES = 100 << 20
"""Ours holds no tensors; Ray's default is 30 % of the memory."""


@contextmanager
def open_session(address: str) -> Iterator[None]:
    """Connect to Ray; with `local`, start it on this machine and stop it at the end.

    Args:
        address: `local`, `auto`, or the address of a cluster: `10.0.0.1:6379`.

    Raises:
        ServiceError: `INVALID_ARGUMENT`: Ray is not installed, does not answer there, or `auto` could mean
            any of several clusters.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address == LOCAL:
        # Ray (2.60) listens on every interface and runs what its clients send. It makes the token itself, in
        # the home folder, where `trocar cluster` of the same user finds it.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        # Ray (2.60) gives workers a niceness of 15: beside other programs replicas would hardly run.
        os.environ.setdefault("RAY_worker_niceness", "0")
    try:
        import ray
        from ray.exceptions import AuthenticationError
    except ModuleNotFoundError as error:
        raise ServiceError(
            ErrorReason.INVALID_ARGUMENT,
            f"a cluster needs Ray, and {error.name!r} is not installed: pip install 'trocar[server,ray]'",
        ) from None
    check_reachable(address)
    if address != LOCAL:
        _look_at_this_machine(address)
    own = {"object_store_memory": _OBJECT_STORE_BYTES, "include_dashboard": False} if address == LOCAL else {}
    try:
        ray.init(
            address=address,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
            **own,
        )
    except AuthenticationError as error:
        raise ServiceError(
            ErrorReason.TOKEN_INVALID,
            f"the Ray cluster at '{address}' wants its own token: {first_line(error)}; see RAY_AUTH_MODE and "
            "RAY_AUTH_TOKEN_PATH in the documentation of Ray",
        ) from None
    except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
        raise _no_cluster(address, first_line(error)) from None
    try:
        yield
    finally:
        ray.shutdown()


def check_reachable(address: str) -> None:
    """Refuse an address where nothing listens: Ray (2.60) would try for minutes.

    Raises:
        ServiceError: `INVALID_ARGUMENT`.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return  # `local`, `auto`, or a name that Ray understands
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise _no_cluster(address, str(error)) from None


def _look_at_this_machine(address: str) -> None:
    """Refuse `auto` where any of several clusters could be meant, and use Ray's token for one that is named.

    For `auto` Ray (2.60) takes the cluster of `RAY_ADDRESS`, or the one that `ray start` noted, or else any:
    a stop would stop another's. And only for `auto` it uses the token that a local cluster has made.

    Raises:
        ServiceError: `INVALID_ARGUMENT`.
    """
    from ray._private import services  # what `ray.init` itself asks
    from ray._private.authentication import authentication_token_setup

    result = sorted(services.find_gcs_addresses())
    if address in result:
        logging.getLogger("ray").setLevel(logging.ERROR)  # as `ray.init` does; this would warn of the token
        authentication_token_setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    is_noted = os.environ.get("RAY_ADDRESS") or services.find_bootstrap_address(None)
    if address == AUTO and len(result) > 1 and not is_noted:
        raise ServiceError(
            ErrorReason.INVALID_ARGUMENT,
            f"several Ray clusters run on this machine: name one of them, --ray {' or --ray '.join(result)}",
        )


def _reason(why: str) -> str:
    """Return a reason in brackets; nothing for Ray's advice on its own options."""
    return "" if "Please specify" in why else f" ({why.rstrip('.')})"


def _no_cluster(address: str, why: str) -> ServiceError:
    return ServiceError(
        ErrorReason.INVALID_ARGUMENT,
        f"no Ray cluster answers at '{address}'{_reason(why)}; start one with `ray start --head`, or use "
        "`--ray local`",
    )
