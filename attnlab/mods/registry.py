"""The score modifiers by name."""

from attnlab.registry import Registry
from attnlab.spec import ScoreMod

score_mods: Registry[ScoreMod] = Registry("score modifier", home="attnlab.mods")


def register_score_mod(mod: ScoreMod) -> ScoreMod:
    """Put a modifier into the registry under its own name; returns it."""
    return score_mods.add(mod.name, mod, owner=mod.torch.__module__)
