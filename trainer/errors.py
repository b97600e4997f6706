"""What the trainer refuses, as one small tree.

``python -m trainer`` prints ``what`` and ``next_step`` and exits with the class's code, without a
traceback. Any other exception is a fault of ours (or of the machine) and shows its traceback.

    TrainerError
    ├── ConfigError       2  the config does not parse, or does not fit the target
    ├── DataError         2  a data file is absent, unreadable or unusable
    ├── TargetError       2  the target model is absent or of a kind that cannot be tapped
    ├── CheckpointError   2  a checkpoint is incomplete, of another config, or of another shape
    ├── ResourceError     4  too little memory or disk, or a device that is not there
    └── NonFiniteError    1  loss or gradient stayed non-finite beyond the limit
"""

from __future__ import annotations


class TrainerError(Exception):
    """``what`` happened, and what to do next."""

    exit_code = 2

    def __init__(self, what: str, *, next_step: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.next_step = next_step

    def __str__(self) -> str:
        return f"{self.what}\n  next: {self.next_step}" if self.next_step else self.what


def first_line(error: BaseException) -> str:
    """Of its message; others' go on for pages."""
    return str(error).strip().partition("\n")[0]


def named_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


class ConfigError(TrainerError):
    pass


class DataError(TrainerError):
    pass


class TargetError(TrainerError):
    pass


class CheckpointError(TrainerError):
    pass


class ResourceError(TrainerError):
    exit_code = 4


class NonFiniteError(TrainerError):
    exit_code = 1
