"""The hash of a fingerprint: the one piece of it that needs no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def digest(full: Mapping[str, Any]) -> dict[str, Any]:
    """The fingerprint as a plan's readable part has it: a hash per part."""
    return {key: hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16] for key, value in full.items()}
