"""The critic: what the policy's hidden state before an answer says the rest of the episode is worth.

A linear layer on the policy's own final hidden states: no second network. Knows nothing of returns or losses.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

FILE = "value_head.safetensors"


@dataclass(frozen=True)  # no slots: jsonargparse reads the defaults from __dict__
class CriticRule:
    """A critic for `data.credit.estimator` ppo or a2c: a value head on the policy's hidden states.

    Args:
        lr: Learning rate of the value head.
        coef: Weight of the value loss beside the policy loss.
        clip: Change of a value in one iteration, in reward, beyond which its loss is clipped; null for no clipping.
        detach: Whether the value loss trains the head only, and not what lies below it.
    """

    lr: float = 1e-3
    coef: float = 0.5
    clip: float | None = 0.2
    detach: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.lr < inf:
            raise ValueError(f"model.critic.lr={self.lr}: must be positive, 0.001 is usual")
        if not 0 < self.coef < inf:
            raise ValueError(
                f"model.critic.coef={self.coef}: must be positive, 0.5 is usual; for no critic critic: null"
            )
        if self.clip is not None and not 0 < self.clip < inf:
            raise ValueError(f"model.critic.clip={self.clip}: must be positive, or null for no clipping; 0.2 is usual")


class Critic(nn.Module):
    """V(s) = w · h + b in float32, 0 for every state at first.

    Args:
        hidden_size: Width of the hidden states.
        detach: Keep the gradient from the hidden states.
    """

    def __init__(self, hidden_size: int, detach: bool):
        super().__init__()
        self.detach = detach
        self.head = nn.Linear(hidden_size, 1, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def save(self, folder: Path) -> None:
        """Write weight [1, hidden] and bias [1] into a file of their own."""
        save_file({name: weight.detach().cpu() for name, weight in self.head.state_dict().items()}, folder / FILE)

    def forward(self, hidden: Tensor) -> Tensor:
        """Values [N], float32, of hidden states [N, hidden]."""
        hidden = hidden.detach() if self.detach else hidden
        with torch.autocast(hidden.device.type, enabled=False):
            # float() also of the weights: under `bf16-true` they are bfloat16
            return nn.functional.linear(hidden.float(), self.head.weight.float(), self.head.bias.float())[:, 0]
