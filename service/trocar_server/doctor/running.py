"""Every check, in order. Each is imported by itself: what is broken is reported, not stumbled over."""

import importlib
from collections.abc import Iterable, Iterator

from trocar_server.config import ServerConfig
from trocar_server.doctor.finding import Check, Finding, fail

_PACKAGE = "trocar_server.doctor"
CHECKS = (
    "environment:check_python",
    "environment:check_packages",
    "environment:check_torch",
    "machine:check_device",
    "machine:check_memory",
    "machine:check_shared_memory",
    "machine:check_open_files",
    "machine:check_clock",
    "storage:check_data_dir",
    "storage:check_room",
    "storage:check_lock",
    "storage:check_leftovers",
    "access:check_open_to",
    "access:check_port",
    "access:check_tokens",
    "access:check_certificates",
    "configuration:check_models",
    "configuration:check_datasets",
)
"""`module:function` of this package."""


def examine(config: ServerConfig, checks: Iterable[str] = CHECKS) -> Iterator[Finding]:
    """Yield what each check finds; one that fails itself is a finding, too."""
    for name in checks:
        try:
            yield from _imported(name)(config)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with this machine, the others go on
            line = (str(error).splitlines() or [""])[0][:200]
            subject = name.partition(":")[2].removeprefix("check_").replace("_", " ")
            yield fail(
                subject, f"could not be checked: {type(error).__name__}: {line}", "see the lines above"
            )


def _imported(name: str) -> Check:
    module, _, function = name.partition(":")
    check: Check = getattr(importlib.import_module(f"{_PACKAGE}.{module}"), function)
    return check
