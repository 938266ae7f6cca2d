"""Counter of a connection's bytes that the parser holds: of a request's line, headers and trailers, whole or not."""

from __future__ import annotations


class HeadCounter:
    """The parser tells of a header when it is whole. What it holds of one that is not is known by the pieces that came:
    all of them, if nothing ended in them; else, of the last one, as much as it has not told at the most."""

    __slots__ = ("_ended", "_most", "_piece_bytes_told", "head_bytes", "is_open", "unfinished_bytes", "untold_bytes")

    def __init__(self, most: int) -> None:
        self._most = most
        self.is_open = True
        """Whether a head has begun, or has to begin, that is not whole."""
        self.head_bytes = 0
        """Of the last request's line, headers and trailers as far as they are told."""
        self.unfinished_bytes = 0
        """Of the pieces that hold nothing but one unfinished part."""
        self.untold_bytes = 0
        """The most that the parser may hold."""
        self._piece_bytes_told = 0
        self._ended = False

    @property
    def too_large(self) -> bool:
        return self.head_bytes > self._most or self.unfinished_bytes > self._most

    def begin(self) -> None:
        """A request begins."""
        self.is_open = True
        self.head_bytes = 0

    def line(self, size: int) -> None:
        """So many bytes of a request's line, a header or a trailer were told."""
        self.head_bytes += size
        self._piece_bytes_told += size

    def body(self, size: int) -> None:
        """So many bytes of a body were told."""
        self._piece_bytes_told += size
        self._ended = True

    def end(self) -> None:
        """A head, or a request, is whole."""
        self.is_open = False
        self._ended = True

    def piece(self, size: int) -> None:
        """A piece of so many bytes was parsed."""
        untold = max(0, size - self._piece_bytes_told)
        if self._ended:
            self.unfinished_bytes, self.untold_bytes = 0, untold
        else:
            self.unfinished_bytes += size
            self.untold_bytes += untold
        self._piece_bytes_told, self._ended = 0, False
