"""Digests of settings: the same values give the same digest, whatever file, form or call they came from."""

import hashlib
import json
from typing import Any


def digest_values(*values: Any) -> str:
    """SHA-256 (hex) of plain data: mappings without regard to order, numbers by value as JSON writes them."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
