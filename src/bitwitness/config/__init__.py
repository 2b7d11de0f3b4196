"""What can be set, and from where. No part of it imports torch.

The order: keyword > ``BITWITNESS_*`` > the reference systems' variables > TOML file > default.
"""

from bitwitness.config.dumpconfig import DumpConfig, NPURunConfig
from bitwitness.config.exact import SealConfig
from bitwitness.config.load import Loaded, load_config
from bitwitness.config.schema import (
    TRACER_SETTINGS,
    AlertsConfig,
    ChecksumConfig,
    Config,
    FeatureConfig,
    NonfiniteConfig,
    PeersConfig,
    RanksConfig,
    ReplayConfig,
    StrikesConfig,
    TrendConfig,
    to_dict,
)

__all__ = [
    "TRACER_SETTINGS",
    "AlertsConfig",
    "ChecksumConfig",
    "Config",
    "DumpConfig",
    "FeatureConfig",
    "Loaded",
    "NPURunConfig",
    "NonfiniteConfig",
    "PeersConfig",
    "RanksConfig",
    "ReplayConfig",
    "SealConfig",
    "StrikesConfig",
    "TrendConfig",
    "load_config",
    "to_dict",
]
