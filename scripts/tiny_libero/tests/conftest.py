"""Properties draw what those of the product draw, and what this machine cannot run is skipped."""

from tests.conftest import pytest_collection_modifyitems as pytest_collection_modifyitems
