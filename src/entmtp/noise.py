"""The noise of one sequence: a whole row where it is asked for, else only where it can decide.

The arg-max of a row of scores plus noise needs exact noise for few ids: for all others a bound
shows that they cannot win. The native library makes the words and the bounds. The noise itself is
made by torch alone, so it has the bits of :func:`entmtp.sampling.gumbel_noise`, and tokens are the
same with the library and without.
"""

import numpy as np
import torch
from torch import Tensor

from entmtp.kernels.library import Library, load_library
from entmtp.sampling import gumbel, gumbel_noise

__all__ = ["NoiseSource"]

_KEPT_POSITIONS = 16


class NoiseSource:
    """The noise of one sequence; rows are made once for each position that is asked for again.

    Drafting looks at positions that verification and the next steps look at too.
    """

    def __init__(self, seed: int, num_tokens: int) -> None:
        """Noise of token ids ``0 .. num_tokens - 1`` under a seed; bounded memory."""
        self._seed, self._num_tokens = seed, num_tokens
        self._kept: dict[int, Tensor] = {}
        self._ids: Tensor | None = None
        self._of_ids: dict[int, Tensor] = {}

    def of(self, position: int, ids: Tensor) -> Tensor:
        """Noise of some token ids at a position, not to be written to; ids int64 ``(n,)``.

        Rows are kept while the ids are the same tensor.
        """
        if ids is not self._ids:
            self._ids, self._of_ids = ids, {}
        noise = self._of_ids.get(position)
        if noise is None:
            noise = self._of_ids[position] = self._some(position, ids)
            if len(self._of_ids) > _KEPT_POSITIONS:
                del self._of_ids[min(self._of_ids)]
        return noise

    def at(self, position: int, device: torch.device) -> Tensor:
        """:func:`gumbel_noise` at a position; not to be written to."""
        noise = self._kept.get(position)
        if noise is None:
            noise = self._row(position, device)
            self._kept[position] = noise
            if len(self._kept) > _KEPT_POSITIONS:
                del self._kept[min(self._kept)]
        return noise

    def best(self, scores: Tensor, position: int) -> int:
        """Arg-max of scores plus noise at a position; ties go to the lower id.

        Args:
            scores: float32 ``(V,)``.
            position: as in :func:`gumbel_noise`.
        """
        if not scores.is_cpu:
            return int(torch.argmax(scores + self.at(position, scores.device)))
        library = load_library()
        if library is not None and position not in self._kept:
            return _best_candidate(library, self._seed, position, scores)
        # a tenth of the time of torch's; the first of equal ones, as there
        return int((scores + self.at(position, scores.device)).numpy().argmax())

    def _some(self, position: int, ids: Tensor) -> Tensor:
        library = load_library()
        if library is None or not ids.is_cpu:
            return self.at(position, ids.device)[ids]
        words = library.noise_words(self._seed, position, self._num_tokens)
        return gumbel(torch.from_numpy(words[ids.numpy()]))

    def _row(self, position: int, device: torch.device) -> Tensor:
        library = load_library()
        if library is None or device.type != "cpu":
            return gumbel_noise(self._seed, position, self._num_tokens, device)
        return gumbel(torch.from_numpy(library.noise_words(self._seed, position, self._num_tokens)))


def _best_candidate(library: Library, seed: int, position: int, scores: Tensor) -> int:
    row = np.ascontiguousarray(scores.numpy(), dtype=np.float32)
    ids, words = library.noise_candidates(seed, position, row)
    if len(ids) == 1:
        return int(ids[0])
    sums = row[ids] + gumbel(torch.from_numpy(words)).numpy()
    return int(ids[sums.argmax()])
