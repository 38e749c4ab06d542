"""The trained modules behind the Medusa and Hydra drafters, for inference and for training.

Head i (0-based) reads the target's hidden state h_t and predicts token x_{t+2+i}; x_{t+1} is the
root, which is known. Medusa (Cai et al. 2024): from h_t alone. Hydra (Ankner et al. 2024): also
from the embeddings of x_{t+1} .. x_{t+1+i}, the root and the draft tokens above.

Heads score a *hot vocabulary*: the tokens that matter for drafting, ``hot_ids``. Output matrices
are the head's own, or rows of the target's output head that are attached when heads are loaded.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from entmtp.linear import Projection, pack_linears

__all__ = ["HeadsConfig", "HydraHeads", "MedusaHeads", "build_heads"]


@dataclass(frozen=True)
class HeadsConfig:
    """Sizes of a set of heads.

    Attributes:
        kind: ``medusa`` or ``hydra``.
        hidden_size: H of the target.
        vocab_size: V of the target.
        num_heads: depths that can be drafted.
        num_layers: blocks a head; the first of a Hydra head is the conditioned one.
        embed_scale: factor on the target's embeddings where they enter a Hydra head.
        has_own_output: each head has its own output matrix with bias.
    """

    kind: str
    hidden_size: int
    vocab_size: int
    num_heads: int = 4
    num_layers: int = 1
    embed_scale: float = 1.0
    has_own_output: bool = False


class _ResBlock(nn.Module):
    """x + SiLU(W x + b); W starts at zero, so a new block passes its input on."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + functional.silu(self.linear(x))
        return out


class _ConditionedBlock(nn.Module):
    """R u + SiLU(W u + b) on u = [h, E(x_{t+1}), ...]; starts by passing h on."""

    def __init__(self, size: int, num_tokens: int) -> None:
        super().__init__()
        self.residual = nn.Linear((num_tokens + 1) * size, size)
        self.linear = nn.Linear((num_tokens + 1) * size, size)
        nn.init.zeros_(self.residual.weight)
        nn.init.zeros_(self.residual.bias)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        with torch.no_grad():
            self.residual.weight[:, :size].fill_diagonal_(1.0)

    def forward(self, u: Tensor) -> Tensor:
        out: Tensor = self.residual(u) + functional.silu(self.linear(u))
        return out


class _Heads(nn.Module):
    """What both kinds share: the hot vocabulary and the output matrices."""

    hot_ids: Tensor
    shared_output: Tensor

    def __init__(self, config: HeadsConfig, hot_ids: Tensor) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("hot_ids", hot_ids.to(torch.int64))
        self.register_buffer("shared_output", torch.empty(0, config.hidden_size), persistent=False)
        self._project_output: Projection | None = None
        self.outputs = nn.ModuleList()
        if config.has_own_output:
            for _ in range(config.num_heads):
                self.outputs.append(nn.Linear(config.hidden_size, len(hot_ids)))

    def attach_output(self, rows: Tensor) -> None:
        """Use rows ``(len(hot_ids), H)`` of the target's output head, not trained."""
        self.shared_output = rows
        self._project_output = None

    def pack(self) -> None:
        """Lay out all matrices for products of few rows; for inference only, and last."""
        pack_linears(self)
        if not self.config.has_own_output:
            self._project_output = Projection(self.shared_output)

    def logits(self, head: int, features: Tensor) -> Tensor:
        """``(R, len(hot_ids))`` scores over the hot vocabulary from features ``(R, H)``."""
        if self.config.has_own_output:
            out: Tensor = self.outputs[head](features)
            return out
        if self._project_output is not None:
            return self._project_output(features)
        return functional.linear(features, self.shared_output)


class MedusaHeads(_Heads):
    """Independent heads: each reads h_t alone."""

    def __init__(self, config: HeadsConfig, hot_ids: Tensor) -> None:
        super().__init__(config, hot_ids)
        size, layers = config.hidden_size, config.num_layers
        self.blocks = nn.ModuleList(
            nn.Sequential(*(_ResBlock(size) for _ in range(layers)))
            for _ in range(config.num_heads)
        )

    def features(self, head: int, hidden: Tensor, embedded: Tensor | None = None) -> Tensor:
        """Features ``(R, H)`` of one head.

        Args:
            head: index from 0.
            hidden: ``(R, H)`` hidden states h_t.
            embedded: not read; present so that both kinds are called alike.
        """
        del embedded
        out: Tensor = self.blocks[head](hidden)
        return out


class HydraHeads(_Heads):
    """Sequentially dependent heads: head i also reads the i + 1 tokens above."""

    def __init__(self, config: HeadsConfig, hot_ids: Tensor) -> None:
        super().__init__(config, hot_ids)
        size = config.hidden_size
        self.first = nn.ModuleList(
            _ConditionedBlock(size, head + 1) for head in range(config.num_heads)
        )
        self.blocks = nn.ModuleList(
            nn.Sequential(*(_ResBlock(size) for _ in range(config.num_layers - 1)))
            for _ in range(config.num_heads)
        )

    def features(self, head: int, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Features ``(R, H)`` of one head.

        Args:
            head: index i from 0.
            hidden: ``(R, H)`` hidden states h_t.
            embedded: ``(R, i + 1, H)`` target embeddings of x_{t+1} .. x_{t+1+i}, not scaled.
        """
        above = (embedded * self.config.embed_scale).flatten(1)
        out: Tensor = self.blocks[head](self.first[head](torch.cat((hidden, above), dim=1)))
        return out


def build_heads(config: HeadsConfig, hot_ids: Tensor) -> MedusaHeads | HydraHeads:
    """Untrained heads of the kind that ``config`` names."""
    return (HydraHeads if config.kind == "hydra" else MedusaHeads)(config, hot_ids)
