"""The trained modules behind the drafters, for inference and for training.

Head i (0-based) reads the target's hidden state h_t and predicts token x_{t+2+i}; x_{t+1} is the
root, which is known. Medusa (Cai et al. 2024): from h_t alone. Hydra (Ankner et al. 2024): also
from the embeddings of x_{t+1} .. x_{t+1+i}, the root and the draft tokens above. Hydra++ (same
paper) puts the output of a prefix layer in the place of h_t. A recurrent module (DeepSeek-V3 2024)
is one block that is applied again at every depth.

Heads score a *hot vocabulary*: the tokens that matter for drafting, ``hot_ids``. Output matrices
are the head's own, or rows of the target's output head that are attached when heads are loaded.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from entmtp.decoder.block import DecoderBlock, Mixer, rms_norm
from entmtp.decoder.config import BlockConfig
from entmtp.decoder.parameters import BlockParameters
from entmtp.linear import Project, Projection, pack_linears

__all__ = [
    "KINDS",
    "Heads",
    "HeadsConfig",
    "HydraHeads",
    "MedusaHeads",
    "PrefixLayer",
    "RecurrentModule",
    "block_linears",
    "build_heads",
    "conditioned_linears",
]

KINDS = ("medusa", "hydra", "hydra++", "mtp")
"""Kinds of trained modules."""


@dataclass(frozen=True)
class HeadsConfig:
    """Sizes of a set of heads.

    Attributes:
        kind: one of :data:`KINDS`.
        hidden_size: H of the target.
        vocab_size: V of the target.
        num_heads: depths that can be drafted; 1 for ``mtp``, which has no limit.
        num_layers: blocks a head; the first of a Hydra head is the conditioned one.
        embed_scale: factor on the target's embeddings where they enter a Hydra head.
        has_own_output: the heads have output matrices of their own, not the target's.
        has_output_bias: own output matrices have a bias.
        is_output_shared: one own output matrix serves all heads.
        is_tied: the blocks of a head, but for the conditioned one, are one and the same.
        hidden_first: a recurrent module joins [hidden, embedding] instead of the reverse.
        block: sizes of the prefix layer or of the recurrent module's block.
    """

    kind: str
    hidden_size: int
    vocab_size: int
    num_heads: int = 4
    num_layers: int = 1
    embed_scale: float = 1.0
    has_own_output: bool = False
    has_output_bias: bool = True
    is_output_shared: bool = False
    is_tied: bool = False
    hidden_first: bool = False
    block: BlockConfig | None = None


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


class _BlockStack(nn.Sequential):
    """``times`` residual blocks in a row; one that is applied again and again where tied."""

    def __init__(self, size: int, times: int, is_tied: bool) -> None:
        super().__init__(*(_ResBlock(size) for _ in range(min(times, 1) if is_tied else times)))
        self._repeats = times if is_tied else 1

    def linears(self) -> list[nn.Linear]:
        """The linear layers in the order of their use."""
        return [block.linear for block in self if isinstance(block, _ResBlock)] * self._repeats

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self._repeats):
            for block in self:
                x = block(x)
        return x


class Heads(nn.Module):
    """What all kinds share: the hot vocabulary and the output matrices."""

    hot_ids: Tensor
    shared_output: Tensor

    def __init__(self, config: HeadsConfig, hot_ids: Tensor) -> None:
        """Make untrained heads that score the tokens ``hot_ids``, int64 ``(hot,)``."""
        super().__init__()
        self.config = config
        self.register_buffer("hot_ids", hot_ids.to(torch.int64))
        self.register_buffer("shared_output", torch.empty(0, config.hidden_size), persistent=False)
        self._project_output: Callable[[Tensor], Tensor] | None = None
        self.outputs = nn.ModuleList()
        if config.has_own_output:
            for _ in range(1 if config.is_output_shared else config.num_heads):
                size, bias = (config.hidden_size, len(hot_ids)), config.has_output_bias
                self.outputs.append(nn.Linear(*size, bias=bias))

    @property
    def scores_all_tokens(self) -> bool:
        """True where the hot vocabulary is the whole one, in order."""
        whole = torch.arange(self.config.vocab_size, device=self.hot_ids.device)
        return torch.equal(self.hot_ids, whole)

    def attach_output(self, rows: Tensor) -> None:
        """Use rows ``(len(hot_ids), H)`` of the target's output head, not trained."""
        self.shared_output = rows
        self._project_output = None

    def attach_projection(self, project: Callable[[Tensor], Tensor]) -> None:
        """Use the target's whole output head, ``(R, H)`` to ``(R, V)``, where it lies."""
        assert self.scores_all_tokens  # noqa: S101 - the loader asks first
        self._project_output = project

    def pack(self, project: Project = Projection) -> None:
        """Lay out all matrices for products of few rows; for inference only, and last.

        Args:
            project: makes a product out of a matrix.
        """
        pack_linears(self, project)
        if not self.config.has_own_output and self._project_output is None:
            self._project_output = project(self.shared_output, None)

    def logits(self, head: int, features: Tensor) -> Tensor:
        """``(R, len(hot_ids))`` scores over the hot vocabulary from features ``(R, H)``."""
        if self.config.has_own_output:
            out: Tensor = self.outputs[0 if self.config.is_output_shared else head](features)
            return out
        if self._project_output is not None:
            return self._project_output(features)
        return functional.linear(features, self.shared_output)


class MedusaHeads(Heads):
    """Independent heads: each reads h_t alone."""

    def __init__(self, config: HeadsConfig, hot_ids: Tensor) -> None:
        """Make heads that pass h_t on."""
        super().__init__(config, hot_ids)
        self.blocks = nn.ModuleList(
            _BlockStack(config.hidden_size, config.num_layers, config.is_tied)
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


class PrefixLayer(nn.Module):
    """A whole block with its norm, over the target's hidden states h_0 .. h_t, of Hydra++."""

    def __init__(self, config: BlockConfig) -> None:
        """Make an untrained layer."""
        super().__init__()
        self.config = config
        self.layer: BlockParameters | None = BlockParameters(config)
        self.norm = nn.Parameter(torch.ones(config.hidden_size))
        self._block: DecoderBlock | None = None

    def pack(self, project: Project = Projection) -> None:
        """Lay out the matrices; the parameters themselves are given up."""
        if self.layer is not None:
            self._block, self.layer = self.layer.build(project), None

    def forward(
        self,
        hidden: Tensor,
        rotation: tuple[Tensor, Tensor],
        mix: Mixer,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """s_t ``(R, H)`` of rows h_t ``(R, H)``; arguments as :class:`DecoderBlock`."""
        out = _block_of(self._block, self.layer)(hidden, rotation, mix, wanted)
        return rms_norm(out, self.norm, self.config.rms_norm_eps)


class HydraHeads(Heads):
    """Sequentially dependent heads: head i also reads the i + 1 tokens above."""

    def __init__(self, config: HeadsConfig, hot_ids: Tensor) -> None:
        """Make heads that pass h_t on; of kind ``hydra++`` with an untrained prefix layer."""
        super().__init__(config, hot_ids)
        size = config.hidden_size
        self.first = nn.ModuleList(
            _ConditionedBlock(size, head + 1) for head in range(config.num_heads)
        )
        self.blocks = nn.ModuleList(
            _BlockStack(size, config.num_layers - 1, config.is_tied)
            for _ in range(config.num_heads)
        )
        self.prefix: PrefixLayer | None = None
        if config.kind == "hydra++":
            assert config.block is not None  # noqa: S101 - whoever makes the config sees to it
            self.prefix = PrefixLayer(config.block)

    def pack(self, project: Project = Projection) -> None:
        """Lay out all matrices, those of the prefix layer too."""
        if self.prefix is not None:
            self.prefix.pack(project)
        super().pack(project)

    def features(self, head: int, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Features ``(R, H)`` of one head.

        Args:
            head: index i from 0.
            hidden: ``(R, H)`` hidden states h_t, or s_t of the prefix layer.
            embedded: ``(R, i + 1, H)`` target embeddings of x_{t+1} .. x_{t+1+i}, not scaled.
        """
        above = (embedded * self.config.embed_scale).flatten(1)
        out: Tensor = self.blocks[head](self.first[head](torch.cat((hidden, above), dim=1)))
        return out


class RecurrentModule(Heads):
    """One multi-token module, used again at every depth.

    The row of position t joins the normed embedding of x_{t+1} and the normed h_t by a matrix,
    passes a block with attention over all earlier rows, and is normed: g_t, from which x_{t+2} is
    scored. At the next depth g_t takes the place of h_{t+1}.
    """

    def __init__(self, config: HeadsConfig, hot_ids: Tensor) -> None:
        """Make an untrained module."""
        super().__init__(config, hot_ids)
        assert config.block is not None  # noqa: S101 - whoever makes the config sees to it
        size = config.hidden_size
        self.block_config = config.block
        self.embed_norm = nn.Parameter(torch.ones(size))
        self.hidden_norm = nn.Parameter(torch.ones(size))
        self.final_norm = nn.Parameter(torch.ones(size))
        self.join = nn.Linear(2 * size, size, bias=False)
        self.layer: BlockParameters | None = BlockParameters(config.block)
        self._block: DecoderBlock | None = None

    def pack(self, project: Project = Projection) -> None:
        """Lay out all matrices; the parameters of the block are given up."""
        if self.layer is not None:
            self._block, self.layer = self.layer.build(project), None
        super().pack(project)

    def features(
        self,
        hidden: Tensor,
        embedded: Tensor,
        rotation: tuple[Tensor, Tensor],
        mix: Mixer,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """g_t ``(R, H)``, or of the wanted rows.

        Args:
            hidden: ``(R, H)`` h_t of the target, or g of the row above in a draft tree.
            embedded: ``(R, H)`` target embeddings of x_{t+1}.
            rotation: at the rows' positions t.
            mix: stores keys and values, and attends.
            wanted: as of :class:`DecoderBlock`.
        """
        block = _block_of(self._block, self.layer)
        eps = self.block_config.rms_norm_eps
        parts = (
            rms_norm(embedded, self.embed_norm, eps),
            rms_norm(hidden, self.hidden_norm, eps),
        )
        joined = self.join(torch.cat(parts[::-1] if self.config.hidden_first else parts, dim=1))
        return rms_norm(block(joined, rotation, mix, wanted), self.final_norm, eps)


def _block_of(packed: DecoderBlock | None, layer: BlockParameters | None) -> DecoderBlock:
    """The block for inference once there is one, else the one for training."""
    if packed is not None:
        return packed
    assert layer is not None  # noqa: S101 - one of the two is always there
    return layer.trainable()


def block_linears(heads: MedusaHeads | HydraHeads, head: int) -> list[nn.Linear]:
    """Of the residual blocks of a head, in the order of their use, before heads are packed."""
    stack = heads.blocks[head]
    assert isinstance(stack, _BlockStack)  # noqa: S101 - it is made of nothing else
    return stack.linears()


def conditioned_linears(heads: HydraHeads, head: int) -> tuple[nn.Linear, nn.Linear]:
    """R and W of the conditioned block of a head, before heads are packed."""
    block = heads.first[head]
    assert isinstance(block, _ConditionedBlock)  # noqa: S101
    return block.residual, block.linear


def build_heads(config: HeadsConfig, hot_ids: Tensor) -> MedusaHeads | HydraHeads | RecurrentModule:
    """Untrained heads of the kind that ``config`` names."""
    if config.kind == "medusa":
        return MedusaHeads(config, hot_ids)
    if config.kind == "mtp":
        return RecurrentModule(config, hot_ids)
    return HydraHeads(config, hot_ids)
