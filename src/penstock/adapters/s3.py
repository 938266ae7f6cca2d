"""Source that is a bucket of an S3-compatible store, or what lies below a prefix in it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import BaseError, InvalidPathError, PermissionDeniedError, PreconditionError
from obstore.store import S3Store

from penstock.adapters.config import S3Place
from penstock.adapters.paths import Pattern, explain_bad_path
from penstock.adapters.source import (
    PAGE_FILES,
    FileNotReady,
    FileUnreadable,
    FoundFile,
    SourceUnavailable,
    changed,
    missing,
)

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import S3Config

# Each range is a request with a timeout of its own: how large an object is does not matter to it.
_RANGE_BYTES = 4 * 1024 * 1024
_RETRIES = 2


class S3Source:
    """Bucket, listed."""

    whole_when_listed = True

    def __init__(self, place: S3Place, pattern: Pattern, timeout_s: float) -> None:
        self._prefix = place.prefix
        self._pattern = pattern
        timeout = timedelta(seconds=timeout_s)
        config: S3Config = {"region": place.region}
        if place.endpoint:
            config["endpoint"] = place.endpoint
        self._store = S3Store(
            place.bucket,
            config=config,
            access_key_id=place.access_key(),
            secret_access_key=place.secret_key(),
            client_options={
                "allow_http": place.endpoint.startswith("http://"),
                "timeout": timeout,
                "connect_timeout": timeout,
            },
            retry_config={"max_retries": _RETRIES, "retry_timeout": timeout},
        )

    async def list_files(self) -> AsyncGenerator[list[FoundFile]]:
        listing = obstore.list(self._store, self._prefix or None, chunk_size=PAGE_FILES)
        with _explained("the bucket"):
            async for page in listing:
                yield [found for meta in page if (found := self._found(meta)) is not None]

    def changes(self) -> None:
        return None

    async def find(self, path: str) -> FoundFile:
        if not self._pattern.matches(path):
            raise missing(path)
        with _explained(path):
            try:
                found = self._found(await obstore.head_async(self._store, self._prefix + path))
            except FileNotFoundError:
                found = None
        if found is None:
            raise missing(path)
        return found

    async def read(self, file: FoundFile) -> AsyncGenerator[bytes]:
        for start in range(0, file.size, _RANGE_BYTES):
            with _explained(file.path):
                try:
                    answer = await obstore.get_async(
                        self._store,
                        self._prefix + file.path,
                        options={"range": (start, min(start + _RANGE_BYTES, file.size)), "if_match": file.version},
                    )
                    block = bytes(await answer.bytes_async())
                except FileNotFoundError:
                    raise FileNotReady(f"{file.path}: it is gone") from None
                except PreconditionError:
                    raise changed(file.path) from None
                except PermissionDeniedError:
                    raise FileUnreadable(f"{file.path}: the store denies access to it") from None
            yield block

    def _found(self, meta: ObjectMeta) -> FoundFile | None:
        path = meta["path"].removeprefix(self._prefix)
        tag, size = meta["e_tag"], meta["size"]
        # Empty objects stand for directories. Without a tag, one version cannot be told from another.
        if not size or not tag or explain_bad_path(path) or not self._pattern.matches(path):
            return None
        return FoundFile(path, tag, size)


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Errors of the store without their text, which has its address and what it answered."""
    try:
        yield
    except InvalidPathError as error:
        reason = str(error).splitlines()[0]
        raise SourceUnavailable(f"{what} cannot be listed: {reason}", hint="Rename or delete that object.") from None
    except (BaseError, ValueError) as error:
        kind = type(error).__name__.removesuffix("Error")
        raise SourceUnavailable(
            f"{what} cannot be read: the store cannot be reached, or refused ({kind})",
            hint="Check the adapter's endpoint, bucket and keys.",
        ) from None
