"""Pages of memory, and addresses without memory that pages can be put behind."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt
from torch import Tensor

PageIds = npt.NDArray[np.int64]


class Addresses(ABC):
    """A range of addresses, in pages.

    bytes: uint8 [pages of the range * page size]. What no page is behind must not be touched.
    """

    bytes: Tensor

    @abstractmethod
    def back(self, first: int, pages: PageIds) -> None:
        """Put pages of the memory behind the places from `first` on, in place of what is there; -1: one page that
        stands for all others, of which nothing that is written is kept. The device's earlier work on what was there
        must not matter any more. Raises CapacityError."""

    @abstractmethod
    def back_alone(self, first: int, num_pages: int) -> None:
        """Put so many pages that are none of the pool's behind the places from `first` on. Raises CapacityError."""


class Pages(ABC):
    """The pages that a device gives, all there from the start.

    page_bytes: size of a page. bytes: uint8 [pages * page size], all pages one behind the other, at addresses that stay
    also while a page is behind others.
    """

    page_bytes: int
    bytes: Tensor

    @property
    def num_pages(self) -> int:
        return self.bytes.numel() // self.page_bytes

    @abstractmethod
    def reserve(self, num_pages: int) -> Addresses:
        """Return so many pages' addresses, behind which there is nothing yet."""
