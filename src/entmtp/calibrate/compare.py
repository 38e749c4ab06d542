"""Banks against one another: what the best tree of one gives on the texts of another."""

from collections.abc import Mapping

from entmtp.bank import Bank
from entmtp.calibrate.pareto import predicted_rate
from entmtp.calibrate.summary import unpack_trace
from entmtp.errors import BankError

__all__ = ["compare_banks"]


def compare_banks(banks: Mapping[str, Bank]) -> dict[str, dict[str, dict[str, float]]]:
    """Predicted tokens/s of the best tree of each bank on the check half of every other.

    Returns:
        ``[of][on]``: ``tokens_per_s``, and ``share`` of what the best tree of ``on`` gives there.

    Raises:
        BankError: a bank is not calibrated, or its texts are less deep than a tree.
    """
    trees = {name: bank.entries[bank.best] for name, bank in banks.items()}
    table: dict[str, dict[str, dict[str, float]]] = {name: {} for name in banks}
    for on, bank in banks.items():
        calibration = bank.calibration
        if calibration is None:
            raise BankError(f"{on}: not calibrated, so it has no texts to compare on")
        _, check = unpack_trace(calibration.trace).halves()
        rates = {
            of: predicted_rate(check, tree.truncate(check.max_depth), calibration.costs)
            for of, tree in trees.items()
        }
        for of, rate in rates.items():
            table[of][on] = {"tokens_per_s": rate, "share": rate / rates[on]}
    return table
