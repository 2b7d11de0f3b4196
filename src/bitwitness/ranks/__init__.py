"""The other ranks: reached over a side channel, or none at all."""

from bitwitness.ranks.alone import Alone
from bitwitness.ranks.channel import SideChannel
from bitwitness.ranks.protocol import Ranks

__all__ = ["Alone", "Ranks", "SideChannel"]
