"""How a policy is loaded: in words, so that any process can do it."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from deft_policies.base import Policy

LoadPolicy = Callable[[], Policy]


@dataclass(frozen=True)
class PolicyRecipe:
    """A function, as `module:name`, and its arguments; call the recipe to load the policy here."""

    function: str
    arguments: tuple[str, ...] = ()

    def __call__(self) -> Policy:
        """Load the policy."""
        module, _, name = self.function.partition(":")
        policy: Policy = getattr(import_module(module), name)(*self.arguments)
        return policy


def load_and_warm(load: LoadPolicy) -> Policy:
    """Load a policy and make it ready to answer."""
    policy = load()
    policy.warm_up()
    return policy
