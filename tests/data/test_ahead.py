"""One item ahead, never more than two, errors where the item is asked for, no thread left."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref

import pytest

from scdiva.data.ahead import ReadAhead


class Item:
    def __init__(self, key: int) -> None:
        self.key = key


def threads() -> list[str]:
    gc.collect()  # a loader that an earlier test let go of has one until then
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("scdiva-read-ahead")]


def test_items_come_in_order_and_the_next_is_read_meanwhile():
    begun = {key: threading.Event() for key in range(5)}
    names = []

    def read(key):
        begun[key].set()
        names.append(threading.current_thread().name)
        return Item(key)

    with ReadAhead(read, iter(range(5))) as ahead:
        for key in range(5):
            item = ahead.get(key)
            assert item.key == key
            assert ahead.get(key) is item
            assert key == 4 or begun[key + 1].wait(10)
    assert len(names) == 5
    assert threading.current_thread().name not in names
    assert threads() == []


def test_no_more_than_two_items_are_alive():
    alive: weakref.WeakSet = weakref.WeakSet()
    n_alive, read_already = [], [threading.Event() for _ in range(22)]

    def read(key):
        item = Item(key)
        alive.add(item)
        n_alive.append(len(alive))
        read_already[key].set()
        return item

    with ReadAhead(read, itertools.count()) as ahead:
        for key in range(20):
            ahead.get(key)
            assert read_already[key + 1].wait(10)
    assert n_alive == [1] + [2] * 20
    gc.collect()
    assert len(alive) == 0


def test_an_error_reaches_the_caller_at_its_item():
    def read(key):
        if key == 2:
            raise ValueError("item 2 is damaged")
        return key

    with ReadAhead(read, iter(range(4))) as ahead:
        assert [ahead.get(0), ahead.get(1)] == [0, 1]
        for _ in range(2):
            with pytest.raises(ValueError, match="item 2 is damaged"):
                ahead.get(2)
    assert threads() == []


def test_a_key_out_of_turn_is_read_at_once():
    with ReadAhead(lambda key: -key, iter([1, 2])) as ahead:
        assert [ahead.get(key) for key in (7, 1, 9, 2, 3)] == [-7, -1, -9, -2, -3]
