"""Parameters of ``dynamic`` that nobody fitted, for a small envelope and with copies."""

from entmtp.drafters.copying import NUM_MATCHES
from entmtp.scheduler import DynamicParams

__all__ = ["PARAMS"]

PARAMS = DynamicParams(
    envelope=((0,), (1,), (0, 0)),
    odds=((1.0, -1.0, 0.0, 0.0),) * 3,
    trust_bounds=(0.3, 0.7),
    trust_odds=((-1.0, -1.0), (0.0, 0.0), (1.0, 1.0)),
    prior=0.5,
    prior_steps=2.0,
    gains=((0.5, 0.5), (1.0, 1.0), (2.0, 2.0)),
    hits=((0.9, 0.8, 0.7),) * NUM_MATCHES,
    mixes=((0.5, 0.5, 0.5),) * NUM_MATCHES,
    rate=0.1,
    context=150.0,
    mean_nodes=2.0,
)
