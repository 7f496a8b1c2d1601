"""The cache: a flat pool of packed pages, block tables, 8-bit copies, and who owns which page."""

from mlaflax.cache.hot import HotTier, Pages
from mlaflax.cache.latent import LatentCache
from mlaflax.cache.pages import OutOfPages, PageAllocator

__all__ = ["HotTier", "LatentCache", "OutOfPages", "PageAllocator", "Pages"]
