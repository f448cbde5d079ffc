"""Errors for models whose next call depends on what the last one has assigned."""

from __future__ import annotations

from graphplan.errors import NoGraphError

WRITTEN = "written to in place"
READ_AND_ASSIGNED = "read and then assigned"


class KeptStateError(NoGraphError):
    """A call assigns attributes that the next one depends on: the model itself must run, not a copy."""

    @classmethod
    def of(cls, attribute: str, change: str, name: str = "") -> KeptStateError:
        """Return the error for an attribute that a call changes, as ``change`` describes.

        ``name`` is that of a buffer for it, by default the last part of ``attribute``.
        """
        name = name or attribute.rpartition(".")[2]
        return cls(
            f"{attribute} is {change}: a graph keeps nothing from the call before but buffers, and "
            "attributes that keep their shape and type and are assigned tensors without a gradient "
            f"(.detach()). Make it a buffer, by register_buffer({name!r}, ...)"
        )
