"""The version of the installed distribution."""

from __future__ import annotations

from importlib import metadata

__all__ = ["installed_version"]


def installed_version() -> str:
    """Its source is Cargo.toml, which the wheel's metadata repeats."""
    try:
        return metadata.version("penstock")
    except metadata.PackageNotFoundError:
        return "0+unknown"  # run from a source tree that was never installed
