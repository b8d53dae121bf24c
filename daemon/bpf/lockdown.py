"""The kernel's lockdown: in its mode confidentiality even root may load no program that reads the kernel's memory."""

from __future__ import annotations

from pathlib import Path

from probing.api.errors import AttachError, PrivilegeError

__all__ = ("CONFIDENTIALITY", "LOCKDOWN", "REMEDY", "explained", "lockdown_mode")

CONFIDENTIALITY = "confidentiality"
REMEDY = "boot with lockdown=integrity, or without Secure Boot"
LOCKDOWN = Path("/sys/kernel/security/lockdown")
_MAX_REASON = 200


def lockdown_mode() -> str:
    """Returns none, integrity or confidentiality; empty where the kernel has no lockdown."""
    try:
        # All modes, with the one that holds in brackets.
        return LOCKDOWN.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return ""


def explained(error: AttachError | PrivilegeError) -> AttachError | PrivilegeError:
    """Returns the error that programs cannot be loaded, with the lockdown as its reason where that holds."""
    if lockdown_mode() != CONFIDENTIALITY:
        return error
    message = f"the kernel is locked down (confidentiality) and refuses our programs: {error.message[:_MAX_REASON]}"
    return PrivilegeError(message, hint=REMEDY)
