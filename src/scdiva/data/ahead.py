"""Reading one item ahead in a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

Key = TypeVar("Key")
Item = TypeVar("Item")


class ReadAhead(Generic[Key, Item]):
    """Items by key: while one is in use, a thread reads that of the next key. There are never more than two.

    To be used in a ``with`` block, at the end of which the thread is gone.

    Parameters
    ----------
    read
        Reads the item of a key; called in the thread. What it raises is raised where the item is asked for.
    keys
        The keys in the order in which they will be asked for. Another one is read at once, without the thread.
    """

    def __init__(self, read: Callable[[Key], Item], keys: Iterator[Key]) -> None:
        self._read, self._keys = read, keys
        self._now: tuple[Key, Item] | None = None
        self._next: tuple[Key, Future[Item]] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scdiva-read-ahead")

    def __enter__(self) -> ReadAhead[Key, Item]:
        return self

    def __exit__(self, *exc: Any) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._now = self._next = None

    def get(self, key: Key) -> Item:
        """Give the item of a key, and begin to read the next one.

        Parameters
        ----------
        key
            Which item.
        """
        if self._now is not None and self._now[0] == key:
            return self._now[1]
        self._now = None  # let go of the old one first
        if self._next is None:
            self._begin()
        if self._next is not None and self._next[0] == key:
            item = self._next[1].result()
            self._now, self._next = (key, item), None
            self._begin()
        else:
            item = self._read(key)
            self._now = key, item
        return item

    def _begin(self) -> None:
        key = next(self._keys, None)
        if key is not None:
            self._next = key, self._thread.submit(self._read, key)
