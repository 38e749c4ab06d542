"""The noise of one sequence: a whole row where it is asked for, else only where it can decide.

The arg-max of a row of scores plus noise needs exact noise for few ids: for all others a bound
shows that they cannot win. The native library makes the words and the bounds. The noise itself is
made by torch alone, so it has the bits of :func:`entmtp.sampling.gumbel_noise`, and tokens are the
same with the library and without.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from entmtp.kernels.library import load_library
from entmtp.sampling import (
    LEAST_TEMPERATURE,
    gumbel,
    gumbel_noise,
    noise_words,
    rough_gumbel,
    tempered,
)

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
        self._words: dict[int, npt.NDArray[np.uint32]] = {}
        self._ids: Tensor | None = None
        self._of_ids: dict[int, Tensor] = {}

    def of(self, position: int, ids: Tensor) -> Tensor:
        """Noise of some token ids at a position, to rank drafts by; ids int64 ``(n,)``.

        In single precision (:func:`entmtp.sampling.rough_gumbel`), and not to be written to. Rows
        are kept while the ids are the same tensor.
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
        found = self._candidate(scores, 0.0, position)
        if found is not None:
            return found
        # a tenth of the time of torch's; the first of equal ones, as there
        return int((scores + self.at(position, scores.device)).numpy().argmax())

    def best_tempered(self, logits: Tensor, temperature: float, position: int) -> int:
        """:meth:`best` of :func:`entmtp.sampling.tempered` logits, which need not be made.

        Args:
            logits: float32 ``(V,)``.
            temperature: above 0.
            position: as in :func:`gumbel_noise`.
        """
        if logits.is_cpu:
            found = self._candidate(logits, max(temperature, LEAST_TEMPERATURE), position)
            if found is not None:
                return found
        return self.best(tempered(logits, temperature), position)

    def _candidate(self, row: Tensor, temperature: float, position: int) -> int | None:
        """The best by the library, where it can tell; arguments as there."""
        library = load_library()
        if library is None or position in self._kept:
            return None
        values = np.ascontiguousarray(row.numpy(), dtype=np.float32)
        known = self._words.get(position)
        found = library.noise_candidates(self._seed, position, values, temperature, known)
        if found is None:
            return None
        ids, words, scores = found
        if len(ids) == 1:
            return int(ids[0])
        return int(ids[(scores + gumbel(torch.from_numpy(words)).numpy()).argmax()])

    def _some(self, position: int, ids: Tensor) -> Tensor:
        library = load_library()
        if library is None or not ids.is_cpu:
            whole = noise_words(self._seed, position, self._num_tokens, ids.device)
            return rough_gumbel(whole[ids])
        words = self._words.get(position)
        if words is None:
            words = self._words[position] = library.noise_words(
                self._seed, position, self._num_tokens
            )
            if len(self._words) > _KEPT_POSITIONS:
                del self._words[min(self._words)]
        return rough_gumbel(torch.from_numpy((~words[ids.numpy()]).astype(np.float32)))

    def _row(self, position: int, device: torch.device) -> Tensor:
        library = load_library()
        if library is None or device.type != "cpu":
            return gumbel_noise(self._seed, position, self._num_tokens, device)
        return gumbel(torch.from_numpy(library.noise_words(self._seed, position, self._num_tokens)))
