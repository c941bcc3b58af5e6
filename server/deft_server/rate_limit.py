"""How often a caller may ask: a bucket that fills steadily and is emptied by requests. Pure."""


class TokenBucket:
    """Allows `rate_per_s` on average, and `burst` at once."""

    def __init__(self, rate_per_s: float, burst: float) -> None:
        self._rate_per_s = rate_per_s
        self._burst = max(1.0, burst)
        self._tokens = self._burst
        self._filled_s: float | None = None

    def take(self, now_s: float) -> float:
        """Take one token and return 0, or return the seconds until there is one."""
        if self._filled_s is not None:
            gained = max(0.0, now_s - self._filled_s) * self._rate_per_s
            self._tokens = min(self._burst, self._tokens + gained)
        self._filled_s = now_s
        if self._tokens >= 1:
            self._tokens -= 1
            return 0.0
        return (1 - self._tokens) / self._rate_per_s
