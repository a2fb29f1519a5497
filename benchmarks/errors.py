"""Errors of the command line that several modules raise."""


class DeviceError(ValueError):
    """A device that is not there; names those that are."""
