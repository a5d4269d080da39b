"""Which page of the cache holds which tokens of which slot.

A page belongs to as many slots as share it; it is written only while one slot holds it::

    free pages + pages held by at least one slot = total          (``check`` proves it)

Shared pages are copied at the first write, so a prefix costs nothing until somebody appends to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Pages:
    """Page tables of ``slots`` sequences over ``total`` pages of ``size`` tokens."""

    slots: int
    total: int
    size: int
    tables: list[list[int]] = field(init=False)  # page numbers per slot, in token order
    lengths: list[int] = field(init=False)  # tokens per slot
    _free: list[int] = field(init=False)
    _holders: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.tables = [[] for _ in range(self.slots)]
        self.lengths = [0] * self.slots
        self._free = list(range(self.total - 1, -1, -1))
        self._holders = [0] * self.total

    @property
    def free_pages(self) -> int:
        """Pages that no slot holds."""
        return len(self._free)

    def wanted(self, slot: int, count: int) -> int:
        """Free pages that appending ``count`` tokens to the slot takes."""
        more = -(-(self.lengths[slot] + count) // self.size) - len(self.tables[slot])
        return more + (1 if count and self._shared_tail(slot) else 0)

    def extend(self, slot: int, count: int) -> tuple[int, int] | None:
        """Appends room for ``count`` tokens; the caller has seen that ``wanted`` pages are free. Returns
        the page to be copied and where to, when the slot's last page was shared."""
        copied = None
        table = self.tables[slot]
        if count and self._shared_tail(slot):
            copied = (table[-1], self._take())
            self._drop(table[-1])
            table[-1] = copied[1]
        self.lengths[slot] += count
        while len(table) * self.size < self.lengths[slot]:
            table.append(self._take())
        return copied

    def cut(self, slot: int, length: int) -> None:
        """Cuts the slot to its first ``length`` tokens."""
        table = self.tables[slot]
        keep = -(-length // self.size)
        for page in table[keep:]:
            self._drop(page)
        del table[keep:]
        self.lengths[slot] = length

    def share(self, source: int, target: int, length: int) -> None:
        """The empty slot ``target`` then holds the first ``length`` tokens of ``source``."""
        pages = self.tables[source][: -(-length // self.size)]
        for page in pages:
            self._holders[page] += 1
        self.tables[target] = pages
        self.lengths[target] = length

    def check(self) -> None:
        """Proves the ownership picture. Raises ``AssertionError`` with the numbers that do not add up."""
        counted = [0] * self.total
        for slot, table in enumerate(self.tables):
            if len(table) != -(-self.lengths[slot] // self.size):
                raise AssertionError(f"slot {slot} holds {self.lengths[slot]} tokens in {len(table)} pages")
            for page in table:
                counted[page] += 1
        held = sum(1 for holders in counted if holders)
        if counted != self._holders or held + len(self._free) != self.total or len(set(self._free)) != len(self._free):
            raise AssertionError(f"{len(self._free)} free + {held} held != {self.total} pages")

    def _shared_tail(self, slot: int) -> bool:
        """Whether the next token goes into a page that another slot holds too."""
        return bool(self.lengths[slot] % self.size) and self._holders[self.tables[slot][-1]] > 1

    def _take(self) -> int:
        page = self._free.pop()
        self._holders[page] = 1
        return page

    def _drop(self, page: int) -> None:
        self._holders[page] -= 1
        if not self._holders[page]:
            self._free.append(page)
