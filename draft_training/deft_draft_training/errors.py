"""Exceptions of the training package.

TrainingError
├── ConfigError       a configuration that cannot be used; the message names the key
├── DivergedError     losses that are not finite
├── DataError         demonstrations, recordings or feature shards that cannot be read
├── ResumeError       a run directory of another configuration, or that is being written to
└── StorageError      a file that cannot be written, on a full disk for example
"""


class TrainingError(Exception):
    """Base class of everything the training package raises on purpose."""


class ConfigError(TrainingError):
    """A configuration that cannot be used; the message names the key and what was expected."""


class DivergedError(TrainingError):
    """Losses that are not finite; the message names the step."""


class DataError(TrainingError):
    """Training data that cannot be used; the message names the file and the fix."""


class ResumeError(TrainingError):
    """A run directory that another configuration wrote, or another training is writing to."""


class StorageError(TrainingError):
    """A file that cannot be written; what was there before is unchanged."""
