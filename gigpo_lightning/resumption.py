"""Whether the weights of a checkpoint are those that a run, or an evaluation, can take over.

Knows the names of a checkpoint's entries, not how a strategy reads them.
"""

from __future__ import annotations

from typing import Any

from gigpo_lightning.policy.finite import not_finite

_REFERENCE, _CRITIC = "reference.", "policy.critic."


def settle_weights(
    weights: dict[str, Any], *, fitting: bool, has_reference: bool, kl_coef: float, has_critic: bool
) -> None:
    """Refuse weights that a fit cannot go on with, and drop those that an evaluation does not need.

    Args:
        weights: `state_dict` of the checkpoint; changed in place.
        fitting: Whether training goes on; it does so with the reference and the critic of the checkpoint.
        has_reference: Whether this run has a reference policy.
        kl_coef: What decides that, for the message.
        has_critic: Whether this run has a critic.

    Raises:
        ValueError: A weight is not finite, or reference or critic are only here or only there.
    """
    broken = not_finite(weights.items())
    if broken:
        raise ValueError(f"the checkpoint cannot be used: its weight {broken} is not finite; take an earlier one")
    reference, critic = ([name for name in weights if name.startswith(part)] for part in (_REFERENCE, _CRITIC))
    if fitting and bool(reference) != has_reference:
        raise ValueError(
            f"model.kl_coef={kl_coef}, but the checkpoint holds {'a' if reference else 'no'} reference policy: resume "
            f"with {'a positive kl_coef' if reference else 'kl_coef 0'}, or start without ckpt_path"
        )
    if fitting and bool(critic) != has_critic:
        raise ValueError(
            f"model.critic is {'set' if has_critic else 'null'}, but the checkpoint holds {'a' if critic else 'no'} "
            "critic: resume with the estimator and the critic of its run, or start without ckpt_path"
        )
    for name in [*([] if has_reference else reference), *([] if has_critic else critic)]:
        del weights[name]
