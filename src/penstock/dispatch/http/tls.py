"""TLS of outgoing connections: which certificates are trusted and shown, and what a failed handshake means."""

from __future__ import annotations

import ssl
from functools import lru_cache
from pathlib import Path

from penstock.dispatch.http.errors import TransportError
from penstock.errors import UsageError

# OpenSSL's X509_V_ERR_*, which Python hands on as `verify_code` and has no names for.
_NOT_VALID_NOW = frozenset({9, 10})
_UNKNOWN_ISSUER = frozenset({2, 18, 19, 20, 21, 27})
_OTHER_NAME = frozenset({62, 64})
# OpenSSL's names of the alerts by which a server refuses the client's certificate. An alert has no type or number of
# its own in Python, only this documented `reason`.
_CERTIFICATE_REQUIRED = "TLSV13_ALERT_CERTIFICATE_REQUIRED"
_CERTIFICATE_REFUSED = frozenset(
    {
        "SSLV3_ALERT_BAD_CERTIFICATE",
        "SSLV3_ALERT_CERTIFICATE_EXPIRED",
        "SSLV3_ALERT_CERTIFICATE_REVOKED",
        "SSLV3_ALERT_CERTIFICATE_UNKNOWN",
        "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE",
        "TLSV1_ALERT_ACCESS_DENIED",
        "TLSV1_ALERT_UNKNOWN_CA",
    }
)
_PEM_HINT = "Give a PEM file: it has lines such as -----BEGIN CERTIFICATE-----."


@lru_cache(maxsize=64)
def tls_context(
    ca_file: str | None = None, client_cert_file: str | None = None, client_key_file: str | None = None
) -> ssl.SSLContext:
    """Names and certificates are checked: against the system's authorities, or against those of `ca_file` alone.

    The files are read once in a process. One that cannot be used is a UsageError that names it.
    """
    for setting, path in (
        ("ca_file", ca_file),
        ("client_cert_file", client_cert_file),
        ("client_key_file", client_key_file),
    ):
        if path is not None:
            _check_file(setting, path)
    context = ssl.create_default_context(cafile=ca_file)
    context.set_alpn_protocols(["http/1.1"])
    if client_cert_file is not None:
        _show_certificate(context, client_cert_file, client_key_file)
    return context


def _check_file(setting: str, path: str) -> None:
    try:
        Path(path).read_bytes()
        if setting != "client_key_file":
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError:
        raise UsageError(f"{path} holds no certificate ({setting})", hint=_PEM_HINT) from None
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror} ({setting})", hint="Check the path and your rights to it."
        ) from None


def _show_certificate(context: ssl.SSLContext, cert_file: str, key_file: str | None) -> None:
    path, setting = (key_file, "client_key_file") if key_file is not None else (cert_file, "client_cert_file")

    def refuse_pass_phrase() -> str:  # without this, OpenSSL asks for it on the terminal
        raise UsageError(
            f"the key in {path} is encrypted ({setting})",
            hint="Give a key without a pass phrase that only you can read.",
        )

    try:
        context.load_cert_chain(cert_file, key_file, refuse_pass_phrase)
    except ssl.SSLError:
        raise UsageError(
            f"{path} does not hold the private key of the certificate in {cert_file} ({setting})",
            hint="Name the key's PEM file in client_key_file, unless it is in client_cert_file too.",
        ) from None


def explain_handshake(error: OSError) -> TransportError:
    """Why there is no connection."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _explain_certificate(error)
    reason = error.reason if isinstance(error, ssl.SSLError) else None
    return explain_alert(error) or TransportError(
        "tls_failed",
        f"the TLS handshake failed: {reason or 'the connection was closed'}",
        hint="check the port, whether it should be http://, and whether the upstream wants a client certificate",
    )


def explain_alert(error: Exception | None) -> TransportError | None:
    """The server's word against the client's certificate. With TLS 1.3 it comes only after the handshake."""
    if not isinstance(error, ssl.SSLError):
        return None
    if error.reason == _CERTIFICATE_REQUIRED:
        return TransportError(
            "tls_client_certificate_required",
            "the upstream wants a client certificate",
            hint="name one: client_cert_file and client_key_file of the provider",
        )
    if error.reason in _CERTIFICATE_REFUSED:
        return TransportError(
            "tls_client_certificate_refused",
            f"the upstream does not accept the client certificate: {error.reason}",
            hint="check client_cert_file of the provider: its dates, and that the upstream knows who signed it",
        )
    return None


def _explain_certificate(error: ssl.SSLCertVerificationError) -> TransportError:
    code, hint = "tls_failed", "the upstream must mend its certificate"
    if error.verify_code in _NOT_VALID_NOW:
        code, hint = "tls_certificate_expired", "the upstream must renew it, unless this machine's clock is wrong"
    elif error.verify_code in _OTHER_NAME:
        code, hint = "tls_hostname_mismatch", "base_url must name the host as its certificate does"
    elif error.verify_code in _UNKNOWN_ISSUER:
        code, hint = (
            "tls_certificate_untrusted",
            "if you trust its authority, name that one's file: ca_file, or --ca-file",
        )
    return TransportError(code, f"certificate refused: {error.verify_message.rstrip('.')}", hint=hint)
