"""The page allocator against a model: a set of free ids."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlaflax.cache import OutOfPages, PageAllocator


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 12), st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=30))
def test_no_page_is_ever_held_twice(num_pages, actions):
    allocator, held = PageAllocator(num_pages), []
    for take, n in actions:
        if take:
            in_use = {page for pages in held for page in pages}
            if n > num_pages - len(in_use):
                with pytest.raises(OutOfPages, match=f"{n} cache pages needed, {num_pages - len(in_use)} of"):
                    allocator.allocate(n)
            else:
                pages = allocator.allocate(n)
                assert len(set(pages)) == n and not in_use & set(pages)
                assert all(0 <= page < num_pages for page in pages)
                held.append(pages)
        elif held:
            allocator.release(held.pop(n % len(held)))
        assert allocator.num_free == num_pages - sum(map(len, held))


def test_a_page_cannot_be_released_twice():
    allocator = PageAllocator(3)
    pages = allocator.allocate(2)
    allocator.release(pages)
    with pytest.raises(ValueError, match=f"page {pages[0]} is not in use"):
        allocator.release(pages)
