"""Skips for tests that need newer versions of a package."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from packaging.version import Version


def has(package: str, least: str) -> bool:
    """Whether a package is of this version, or newer."""
    return Version(version(package)) >= Version(least)


def needs(package: str, least: str, reason: str) -> pytest.MarkDecorator:
    """Skip a test with an older version of a package."""
    return pytest.mark.skipif(not has(package, least), reason=f"before {package} {least}, {reason}")
