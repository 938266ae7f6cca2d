"""Rows of `penstock.map`: JSON values of any iterable, or the rows of a pandas or polars frame, each as JSON text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from penstock.errors import UsageError
from penstock.validators import find_no_number


def encode_rows(rows: Any) -> Iterator[bytes]:
    """The rows one by one, as JSON. Raises UsageError for a value that JSON does not have."""
    found, encoder = _rows_of(rows)
    for index, row in enumerate(found):
        try:
            yield encoder.encode(row)
        except (TypeError, ValueError, RecursionError, OverflowError) as error:
            hint = "Rows are JSON values: None, truth values, numbers, texts, lists and dicts of them."
            raise UsageError(f"row {index} cannot be stored: {error}", hint=hint) from None


def _rows_of(rows: Any) -> tuple[Iterable[Any], _Encoder]:
    if hasattr(rows, "iter_rows"):  # polars
        return rows.iter_rows(named=True), _Encoder(of_frame=True)
    if hasattr(rows, "itertuples"):  # pandas
        names = [str(name) for name in rows.columns]
        return (dict(zip(names, row, strict=True)) for row in rows.itertuples(index=False, name=None)), _Encoder(
            of_frame=True
        )
    if isinstance(rows, str | bytes) or not isinstance(rows, Iterable):
        hint = "Give a list, a generator, or a pandas or polars frame."
        raise UsageError(f"rows is {type(rows).__name__}, not an iterable of rows", hint=hint)
    return rows, _Encoder(of_frame=False)


class _Encoder:
    """Encoder of rows. A frame's NaN is a missing value, and becomes null; elsewhere NaN is refused."""

    def __init__(self, *, of_frame: bool) -> None:
        self._of_frame = of_frame
        self._encoder = msgspec.json.Encoder(enc_hook=self._plain)

    def encode(self, row: Any) -> bytes:
        text = self._encoder.encode(row)
        if not self._of_frame and b"null" in text:
            number = find_no_number(msgspec.to_builtins(row, enc_hook=self._plain))
            if number is not None:
                raise ValueError(f"it holds {number}, which JSON has not; write None")
        return text

    def _plain(self, value: Any) -> Any:
        if self._of_frame and type(value).__name__ in ("NAType", "NaTType"):
            return None
        if hasattr(value, "item"):  # numpy's numbers
            return value.item()
        if hasattr(value, "isoformat"):  # pandas' times
            return value.isoformat()
        raise TypeError(f"{type(value).__name__} is no JSON value")
