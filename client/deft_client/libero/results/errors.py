"""What can go wrong around an evaluation; every message says what to do.

EvaluationError
├── SelectionError          tasks, trials or variants that cannot be evaluated as asked
├── ProfileError            the chosen profile and the server do not fit together
├── PeerAnswerError         a server of another project answered something that is no action
├── VideoError              an episode's video cannot be written
├── EvaluationStoppedError  the evaluation ended early; what was finished is on disk
└── ResultsError
    ├── ResultsMismatchError    the folder holds results of another run, version or options
    ├── ResultsDamagedError     a line that is no episode, or an episode twice
    ├── ResultsBusyError        another process is writing there
    └── ResultsWriteError       the disk refused; what was written before is intact
"""

from deft_client.errors import DeftError


class EvaluationError(DeftError):
    """Base class of everything an evaluation raises on purpose."""


class SelectionError(EvaluationError):
    """Tasks, trials or variants that cannot be evaluated as asked."""


class ProfileError(EvaluationError):
    """The chosen profile and the server do not fit together."""


class PeerAnswerError(EvaluationError):
    """A server of another project answered something that is no action."""


class VideoError(EvaluationError):
    """An episode's video cannot be written; the episode itself is not affected."""


class EvaluationStoppedError(EvaluationError):
    """The evaluation ended early; what was finished is on disk."""


class ResultsError(EvaluationError):
    """Base class of everything around result files."""


class ResultsMismatchError(ResultsError):
    """The folder holds results of another run, version or options."""


class ResultsDamagedError(ResultsError):
    """A line that is no episode, or an episode that is there twice."""


class ResultsBusyError(ResultsError):
    """Another process is writing to the same folder."""


class ResultsWriteError(ResultsError):
    """The disk refused to take a result; what was written before is intact."""
