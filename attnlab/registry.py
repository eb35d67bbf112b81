"""Registries: a name for each split policy, score modifier, pool or picture. Adding one is a file and a decorator."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """A named collection that knows what it holds. `home`: a package whose files register themselves, when asked for.

    >>> sizes: Registry[int] = Registry("size")
    >>> sizes.add("small", 1, owner="shirts")
    1
    >>> sizes.names()
    ['small']
    >>> sizes.get("large")
    Traceback (most recent call last):
    ValueError: size: expected one of small, got 'large'
    """

    def __init__(self, kind: str, *, home: str | None = None) -> None:
        self.kind, self._home = kind, home
        self._items: dict[str, T] = {}
        self._owners: dict[str, str] = {}

    def add(self, name: str, item: T, *, owner: str) -> T:
        """Put an item under a name; `owner` is the module that it comes from.

        A module may replace its own item, so that a notebook cell can be run again; a name that another
        module took is an error. A newcomer comes after the home package, whose names it may not take.
        """
        if self._home is not None and not f"{owner}.".startswith(f"{self._home}."):
            self._fill()
        taken_by = self._owners.get(name, owner)
        if taken_by != owner:
            raise ValueError(f"{self.kind}: the name {name!r} is taken by {taken_by}; choose another")
        self._items[name], self._owners[name] = item, owner
        return item

    def get(self, name: str) -> T:
        """Return the item of that name; raise ValueError with the known names where there is none."""
        self._fill()
        if not isinstance(name, str) or name not in self._items:
            raise ValueError(f"{self.kind}: expected one of {', '.join(self._items)}, got {name!r}")
        return self._items[name]

    def names(self) -> list[str]:
        """All names, in the order of registration."""
        self._fill()
        return list(self._items)

    def _fill(self) -> None:
        """Import the home package, whose `__init__` imports every file. Python does so once, and anew if it failed."""
        if self._home is not None:
            importlib.import_module(self._home)


def import_all(path: Iterable[str], package: str) -> None:
    """Import every module of a package, so that each one's registration happens."""
    for module in pkgutil.iter_modules(path):
        importlib.import_module(f"{package}.{module.name}")
