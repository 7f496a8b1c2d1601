"""The latent cache: a flat pool of packed pages, block tables, and who owns which page."""

from mlaflax.cache.latent import LatentCache
from mlaflax.cache.pages import OutOfPages, PageAllocator

__all__ = ["LatentCache", "OutOfPages", "PageAllocator"]
