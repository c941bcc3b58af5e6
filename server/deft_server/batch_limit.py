"""How many frames a batch may have, given that the device may run out of memory. Pure."""

GOOD_BATCHES_BEFORE_GROWTH = 100


class BatchLimit:
    """Halves when the device gives up, grows back by one after many good batches."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._good = 0
        self.size = most

    def gave_up(self, batch_size: int) -> None:
        """Take in that the device could not do a batch of this size."""
        self.size = max(1, min(self.size, batch_size) // 2)
        self._good = 0

    def succeeded(self) -> None:
        """Take in that a batch was answered in one go."""
        self._good += 1
        if self.size < self._most and self._good >= GOOD_BATCHES_BEFORE_GROWTH:
            self.size += 1
            self._good = 0
