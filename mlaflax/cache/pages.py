"""Who owns which page: a free list over the pool, kept on the host."""

from collections.abc import Iterable


class OutOfPages(RuntimeError):
    """The pool has too few free pages for a request."""


class PageAllocator:
    """Hands out page ids 0 .. num_pages - 1, lowest first, and takes them back."""

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` page ids that nobody else holds.

        Raises:
          OutOfPages: fewer are free; nothing is handed out then.
        """
        if count > len(self._free):
            raise OutOfPages(f"{count} cache pages needed, {len(self._free)} of {self.num_pages} are free")
        pages = [self._free.pop() for _ in range(count)]
        self._used.update(pages)
        return pages

    def release(self, pages: Iterable[int]) -> None:
        """Take pages back.

        Raises:
          ValueError: a page that is not handed out, for instance one released twice.
        """
        pages = list(pages)
        for page in pages:
            if page not in self._used:
                raise ValueError(f"page {page} is not in use")
            self._used.remove(page)
        self._free.extend(pages)
        # Descending, so that the next allocation takes the lowest ids, in runs as long as there are.
        self._free.sort(reverse=True)
