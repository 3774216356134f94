"""The numbers of tensors, as the locator imports them."""

from fleetpipe.compare.differences import gaps_of, numbers_of

__all__ = ["gaps_of", "numbers_of"]
