"""TLS errors: the cause and the fix, by the message of gRPC."""

import re

_BY_TEXT: tuple[tuple[str, str], ...] = (
    (
        "WRONG_VERSION_NUMBER|HTTP_REQUEST|tls_validate_record_header",
        "the server speaks plain text, and this connection TLS: leave out tls=, --tls, --ca and https://, or "
        "give the server a certificate (tls_cert, tls_key)",
    ),
    (
        "certificate has expired|CERTIFICATE_EXPIRED",
        "a certificate has expired: renew it (the server reads new files by itself), and check both clocks",
    ),
    (
        "not yet valid",
        "a certificate is not valid yet: check the clocks of both machines",
    ),
    (
        "Hostname Verification|not in peer certificate|name mismatch|IP address mismatch",
        "the certificate is of another name: connect by a name that is in it "
        "(openssl x509 -in cert.pem -noout -ext subjectAltName), or make one with this name",
    ),
    (
        "CERTIFICATE_VERIFY_FAILED|unable to get local issuer|self.signed certificate",
        "the server's certificate is of an authority that is not trusted here: pass the authority's file, "
        'tls=trocar.TlsOptions(ca="ca.pem"), --ca ca.pem or TROCAR_CA=ca.pem',
    ),
    (
        "CERTIFICATE_REQUIRED|BAD_CERTIFICATE|UNKNOWN_CA|certificate required|unknown ca|bad certificate",
        "the server wants a client certificate that it trusts: "
        'tls=trocar.TlsOptions(ca="ca.pem", certificate="me.pem", key="me.key"), '
        "or --cert me.pem --key me.key",
    ),
    (
        "KEY_VALUES_MISMATCH|security handshaker",
        "a certificate or key cannot be used: is the key that of the certificate, and are the files in PEM?",
    ),
)
_PLAIN = re.compile("failed to connect.*(Socket closed|Connection reset)", re.IGNORECASE | re.DOTALL)
"""While connecting: a server that goes away later has no TLS mistake."""
_TO_PLAIN = (
    "if the server wants TLS, connect with tls=True, --tls or https://, and with the authority's file if it "
    "has its own: tls=trocar.TlsOptions(ca=...), --ca"
)
_TO_TLS = (
    "the server ended the connection: if it wants client certificates (mTLS), pass "
    "tls=trocar.TlsOptions(ca=..., certificate=..., key=...), or --cert and --key"
)


def tls_advice(text: str, *, is_tls: bool) -> str:
    """Return what mends a connection that failed, as far as gRPC's text tells; empty otherwise.

    Args:
        text: What gRPC says.
        is_tls: Whether this end speaks TLS.
    """
    for pattern, advice in _BY_TEXT:
        if re.search(pattern, text, re.IGNORECASE):
            return advice
    if _PLAIN.search(text):
        return _TO_TLS if is_tls else _TO_PLAIN
    return ""
