"""Sources by the kind of their adapter, each with the package that an extra of Penstock installs."""

from __future__ import annotations

from penstock.adapters.config import Adapter, FolderPlace, S3Place
from penstock.adapters.source import Source
from penstock.errors import UsageError


def open_source(adapter: Adapter, timeout_s: float) -> Source:
    """Source of an adapter. Raises UsageError if its package or a secret is missing."""
    try:
        return _open(adapter, timeout_s)
    except UsageError as error:
        raise UsageError(f"adapter '{adapter.name}': {error.message}", hint=error.hint) from None


def _open(adapter: Adapter, timeout_s: float) -> Source:
    place, pattern = adapter.place, adapter.pattern
    if isinstance(place, FolderPlace):
        try:
            from penstock.adapters.folder import FolderSource
        except ImportError:
            raise _lacks("watchfiles", "folder") from None
        return FolderSource(place.root, pattern)
    if isinstance(place, S3Place):
        try:
            from penstock.adapters.s3 import S3Source
        except ImportError:
            raise _lacks("obstore", "s3") from None
        return S3Source(place, pattern, timeout_s)
    try:
        from penstock.adapters.ftp import FtpSource
    except ImportError:
        raise _lacks("aioftp", "ftp") from None
    return FtpSource(place, pattern, timeout_s)


def _lacks(package: str, extra: str) -> UsageError:
    return UsageError(f"the package {package} is not installed", hint=f"Install it: pip install 'penstock[{extra}]'")
