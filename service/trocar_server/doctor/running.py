"""Check runner: every check, in order. Each is imported by itself, so that a broken one is reported."""

import importlib
from collections.abc import Iterable, Iterator

from trocar_server.config import ServerConfig
from trocar_server.doctor.finding import Check, Finding, fail

_PACKAGE = "trocar_server.doctor"
CHECKS = (
    "environment_checks:check_python",
    "environment_checks:check_packages",
    "environment_checks:check_torch",
    "machine_checks:check_device",
    "machine_checks:check_memory",
    "machine_checks:check_shared_memory",
    "machine_checks:check_open_files",
    "machine_checks:check_clock",
    "storage_checks:check_data_dir",
    "storage_checks:check_room",
    "storage_checks:check_lock",
    "storage_checks:check_lease",
    "storage_checks:check_leftovers",
    "access_checks:check_open_to",
    "access_checks:check_port",
    "access_checks:check_tokens",
    "access_checks:check_certificates",
    "configuration_checks:check_settings",
    "configuration_checks:check_models",
    "configuration_checks:check_warm_variants",
    "configuration_checks:check_datasets",
)
"""`module:function` of this package."""


def examine(config: ServerConfig, checks: Iterable[str] = CHECKS) -> Iterator[Finding]:
    """Yield the findings of every check; a check that fails is a finding, too."""
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
