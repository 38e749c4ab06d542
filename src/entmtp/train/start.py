"""Where training begins: at the identity, or at heads that were trained before."""

import torch
from torch import Tensor

from entmtp.decoder.parameters import BlockParameters
from entmtp.drafters.heads import Heads, HydraHeads, RecurrentModule
from entmtp.errors import TrainingError

__all__ = ["check_start", "start_as_identity", "start_from"]


@torch.no_grad()
def start_as_identity(heads: Heads, states: Tensor) -> None:
    """Let a new module pass the target's state on, as the residual blocks of other heads do.

    The block adds nothing at first, and the norm behind it gives its output the usual size of the
    states, so the scores begin as the target's own for the token before. Heads without a block
    begin that way as they are.

    Args:
        heads: untrained; changed in place.
        states: ``(N, H)`` some of the target's.
    """
    size = float(states.to(torch.float32).square().mean().sqrt())
    if isinstance(heads, RecurrentModule):
        width = heads.config.hidden_size
        begin = 0 if heads.config.hidden_first else width
        heads.join.weight.zero_()
        heads.join.weight[:, begin : begin + width].fill_diagonal_(1.0)
        _add_nothing(heads.layer)
        heads.final_norm.fill_(size)
    elif isinstance(heads, HydraHeads) and heads.prefix is not None:
        _add_nothing(heads.prefix.layer)
        heads.prefix.norm.fill_(size)


def check_start(trained: Heads, kind: str) -> None:
    """Refuse to begin heads of one kind with those of another.

    Raises:
        TrainingError: says which go together.
    """
    begun = trained.config.kind
    if begun != kind and (begun, kind) != ("hydra", "hydra++"):
        raise TrainingError(
            f"heads of kind {begun} are no start for {kind}; give heads of the same kind, or hydra "
            "for hydra++"
        )


@torch.no_grad()
def start_from(heads: Heads, trained: Heads) -> None:
    """Take over the weights of heads that were trained before.

    Hydra heads can become Hydra++ heads: what they lack, the prefix layer, stays as it is.

    Args:
        heads: untrained; changed in place.
        trained: of the same kind, or ``hydra`` for ``hydra++``, and of the same sizes.

    Raises:
        TrainingError: other heads than that.
    """
    check_start(trained, heads.config.kind)
    given, own = trained.state_dict(), heads.state_dict()
    scales = trained.config.embed_scale, heads.config.embed_scale
    if scales[0] != scales[1]:
        raise TrainingError(
            f"the heads to start from have an embed_scale of {scales[0]:g}, not {scales[1]:g}; "
            "give the same"
        )
    lacking = {name for name in own if not name.startswith("prefix.")} - set(given)
    unfit = {n for n, value in given.items() if n not in own or own[n].shape != value.shape}
    if lacking or unfit:
        names = ", ".join(sorted(lacking | unfit))
        raise TrainingError(
            f"the heads to start from have other sizes (tensors {names} "
            "differ); leave out the options that change sizes, such as --num-layers and --tied"
        )
    for name, value in given.items():
        own[name].copy_(value)


def _add_nothing(layer: BlockParameters | None) -> None:
    assert layer is not None  # noqa: S101 - heads are packed after training
    for name, value in layer.named_parameters():
        if name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            value.zero_()
