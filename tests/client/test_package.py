"""The package's public names, loaded when they are used."""

import subprocess
import sys

import pytest

import deft_client

pytestmark = pytest.mark.promise


@pytest.mark.parametrize("name", deft_client.__all__)
def test_every_public_name_is_there_and_documented(name):
    public = getattr(deft_client, name)
    assert public.__doc__
    # Dataclasses without a docstring of their own get their signature as one.
    assert not public.__doc__.startswith(f"{name}(")


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="PolicyServer"):
        deft_client.PolicyServer  # noqa: B018
    assert set(dir(deft_client)) == set(deft_client.__all__)


def test_importing_the_package_loads_nothing_slow():
    script = "import sys, deft_client; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(run.stdout.split())
    assert "deft_client" in loaded
    assert loaded.isdisjoint({"torch", "transformers", "fastapi", "pydantic", "httpx", "numpy"})


def test_using_the_client_loads_no_torch():
    script = """
import sys, deft_client
for name in deft_client.__all__:
    getattr(deft_client, name)
print(*sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(run.stdout.split())
    assert "deft_client.stream" in loaded
    assert loaded.isdisjoint({"torch", "transformers", "fastapi", "pydantic"})
