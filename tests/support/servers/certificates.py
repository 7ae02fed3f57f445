"""Certificates for TLS tests, made by the `openssl` command."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

OPENSSL = shutil.which("openssl")
_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc", "-utf8", "-days", "2")


@dataclass(frozen=True)
class Certificate:
    """A certificate and its key, as PEM files."""

    certificate: Path
    key: Path


def authority(folder: Path, name: str = "ca") -> Certificate:
    """Make a certificate authority."""
    return _make(folder, name, "/CN=authority", "-addext", "keyUsage=critical,keyCertSign")


def signed(
    ca: Certificate,
    folder: Path,
    name: str,
    subject: str = "/CN=localhost",
    names: str = "DNS:localhost,IP:127.0.0.1",
) -> Certificate:
    """Make a certificate that an authority signs."""
    options = ["-CA", str(ca.certificate), "-CAkey", str(ca.key), "-addext", "basicConstraints=CA:FALSE"]
    if names:
        options += ["-addext", f"subjectAltName={names}"]
    return _make(folder, name, subject, *options)


def _make(folder: Path, name: str, subject: str, *options: str) -> Certificate:
    made = Certificate(folder / f"{name}.pem", folder / f"{name}.key")
    files = ["-out", str(made.certificate), "-keyout", str(made.key)]
    command = [OPENSSL or "openssl", "req", "-x509", *_NEW_KEY, *files, "-subj", subject, *options]
    subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL)
    return made
