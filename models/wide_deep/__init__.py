"""Wide & Deep (Cheng et al., "Wide & Deep Learning for Recommender Systems", DLRS 2016): the model and its losses."""

from hostdev.models.wide_deep.network import L2_COEFFICIENT, L2_MODES, WideDeep, deep_l2, wide_loss

__all__ = ["L2_COEFFICIENT", "L2_MODES", "WideDeep", "deep_l2", "wide_loss"]
