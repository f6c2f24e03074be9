"""What the stand-in engines can do, so that load can be given as a share of it. Pure; used by all others here.

Lengths differ as those of real answers do. With streams of one length the slots of an engine that was filled in one go
would come free in one go for ever after, and whoever goes first would still wait for most of a stream.
"""

from __future__ import annotations

import random
from statistics import mean

ENGINES = 2
SLOTS = 16  # streams that one engine serves at once
FIRST_S = 0.2  # from a slot to the first token
INTERVAL_S = 0.01
LENGTHS = random.Random(1).sample(range(4, 37), 33)  # tokens, over and over in this order
SERVICE_S = FIRST_S + (mean(LENGTHS) - 1) * INTERVAL_S  # how long a stream holds its slot
PER_S = ENGINES * SLOTS / SERVICE_S  # streams that all engines finish
