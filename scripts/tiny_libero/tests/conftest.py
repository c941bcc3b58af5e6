"""Properties draw what those of the product draw."""

import tests.conftest  # noqa: F401
