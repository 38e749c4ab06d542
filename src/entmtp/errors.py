"""Every failure that a user can cause, as one tree.

    EntmtpError                  base class: catch this one
    ├── InputError               a prompt, a parameter or a file of prompts
    ├── TopologyError            a tree that is no tree, or does not fit the drafter
    ├── BankError                a bank file that cannot be used
    ├── CheckpointError          weights that are missing, damaged or of the wrong shape
    │   └── UnsupportedModelError  a sound model that this version cannot decode exactly
    ├── AssetError               a download or a cache folder that failed
    ├── NumericalError           the target produced NaN or infinity
    ├── TraceError               a trace that cannot be read, written or used again
    ├── ClusterError             workers that cannot be had, or compute otherwise than this process
    └── TrainingError            data or settings from which heads cannot be trained

The command line turns each into one line on standard error and exit code 2.
"""

__all__ = [
    "AssetError",
    "BankError",
    "CheckpointError",
    "ClusterError",
    "EntmtpError",
    "InputError",
    "NumericalError",
    "TopologyError",
    "TraceError",
    "TrainingError",
    "UnsupportedModelError",
]


class EntmtpError(Exception):
    """Base class of all errors that entmtp raises on purpose."""


class InputError(EntmtpError):
    """A prompt, a sampling parameter or a prompt file is not usable."""


class TopologyError(EntmtpError):
    """A list of paths is not a prefix-closed tree, or exceeds what a drafter can fill."""


class BankError(EntmtpError):
    """A bank file is damaged, of another schema version, or names an unknown entry."""


class CheckpointError(EntmtpError):
    """Model or head weights are missing, damaged or of the wrong shape."""


class UnsupportedModelError(CheckpointError):
    """The model is sound but has a feature under which tree decoding would be wrong."""


class AssetError(EntmtpError):
    """A model could not be fetched, verified or stored."""


class NumericalError(EntmtpError):
    """The target produced logits that are not finite."""


class TrainingError(EntmtpError):
    """Heads cannot be trained from the data or settings given."""


class ClusterError(EntmtpError):
    """Workers of a cluster cannot be had, end again and again, or differ from this process."""


class TraceError(EntmtpError):
    """A trace file is missing, damaged, or of other prompts, heads or settings."""
