"""The scripted expert as a policy of the evaluation:

    python -m deft_client eval SUITE --local-policy tiny_libero_recipe.expert_policy:expert

It looks at the simulator instead of the frame, so it needs no server. A run of it shows that the
episodes can succeed, and what the simulator alone costs.
"""

from deft_core.types import ActionChunk, Observation
from deft_libero.errors import SelectionError
from deft_libero.policies.source import EpisodePolicy
from deft_libero.simulator.environment import Environment, LiberoEnvironment
from tiny_libero_recipe.expert.expert import Expert, Watch


def expert(environment: Environment) -> EpisodePolicy:
    """The expert for a task of LIBERO."""
    if not isinstance(environment, LiberoEnvironment):
        raise SelectionError(
            f"--local-policy expert plays LIBERO only, not {type(environment).__name__}"
        )
    return ExpertPolicy(environment)


class ExpertPolicy:
    """Answers with the expert's label, in robosuite's units."""

    def __init__(self, environment: LiberoEnvironment) -> None:
        self._environment = environment
        self._expert: Expert | None = None
        self._watch = Watch()

    def start(self, session_id: str) -> None:
        """Look at how the episode begins; the objects have settled by now."""
        self._expert = Expert.for_episode(self._environment)
        self._watch = Watch()

    def act(self, observation: Observation) -> ActionChunk:
        """What the expert would do now."""
        assert self._expert is not None
        scene = self._environment.scene()
        label = self._expert.label(scene, self._watch.see(scene))
        return ActionChunk(label.action[None])

    def close(self) -> None:
        """Nothing to close: the environment belongs to the worker."""
