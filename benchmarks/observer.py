"""Counts the copies of a save at torch's dispatcher, knowing only which tensors are the trainer's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from benchmarks.record import Count

aten = torch.ops.aten
Origin = Literal["optimizer", "weight", "other"]


class CopyObserver(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Records copies into host memory whose source is the trainer's, or was made from what is the trainer's.

    On an accelerator those are the copies that leave the device. Where the tensors are in host memory anyway, a change
    of dtype makes a temporary and moves nothing to anywhere: only copies between equal dtypes count.

    It sees the thread that it is entered in, and no copy below the dispatcher (a storage's `copy_`).
    """

    def __init__(self, optimizer: Iterable[torch.Tensor], weights: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: dict[Origin, list[int]] = {"optimizer": [0, 0], "weight": [0, 0], "other": [0, 0]}
        self.item_calls = 0
        self._of_storage: dict[int, Origin] = {}
        # Weights first: where a parameter is its own master, the optimizer's claim is the later one, and it holds.
        for origin, tensors in (("weight", weights), ("optimizer", optimizer)):
            for tensor in tensors:
                self._of_storage[tensor.untyped_storage().data_ptr()] = origin  # type: ignore[assignment]  # two literals
        self._of_temporary = WeakIdKeyDictionary()

    def count(self, *origins: Origin) -> Count:
        """Return the copies of those origins together."""
        return Count(*(sum(self.counts[origin][i] for origin in origins) for i in (0, 1)))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket
        if name is aten.copy_:
            if not self._see(args[1], args[0]):
                self._pass_on(args[1], args[0])
        elif name is aten._foreach_copy_:
            for destination, source in zip(args[0], args[1], strict=True):
                self._see(source, destination)
        elif name is aten._to_copy:
            if not self._see(args[0], result):
                self._inherit(args[0], result)
        elif name is aten._local_scalar_dense:
            self.item_calls += 1
        elif isinstance(result, torch.Tensor) and not func.__name__.startswith("empty"):
            for argument in args:
                self._inherit(argument, result)
        return result

    def _see(self, source: torch.Tensor, destination: torch.Tensor) -> bool:
        """Count a copy that arrives on the host; return whether it was one."""
        if destination.device.type != "cpu" or destination.numel() == 0:
            return False
        from_device = source.device.type != "cpu"
        origin = self._origin(source) or ("other" if from_device else None)
        if origin is None or (not from_device and source.dtype is not destination.dtype):
            return False
        self.counts[origin][0] += 1
        self.counts[origin][1] += destination.numel() * destination.element_size()
        return True

    def _origin(self, tensor: torch.Tensor) -> Origin | None:
        known: Origin | None = self._of_temporary.get(tensor)  # type: ignore[no-untyped-call]
        return known or self._of_storage.get(tensor.untyped_storage().data_ptr())

    def _pass_on(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """What is gathered on the device in memory of its own is still the trainer's."""
        if destination.device.type != "cpu" and (origin := self._origin(source)) is not None:
            self._of_storage[destination.untyped_storage().data_ptr()] = origin

    def _inherit(self, argument: Any, result: torch.Tensor) -> None:
        if isinstance(argument, torch.Tensor) and (origin := self._origin(argument)) is not None:
            self._of_temporary[result] = origin


@contextmanager
def counted_synchronizations(kind: str) -> Iterator[list[int]]:
    """Count what is asked to wait for the device while it is open: the device, its streams, its events."""
    calls = [0]

    def counting(original: Any) -> Any:
        def synchronize(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            return original(*args, **kwargs)

        return synchronize

    module = torch.get_device_module(kind)
    owners = [module, *(getattr(module, name) for name in ("Stream", "Event") if hasattr(module, name))]
    with ExitStack() as stack:
        for owner in owners:
            if hasattr(owner, "synchronize"):
                stack.enter_context(mock.patch.object(owner, "synchronize", counting(owner.synchronize)))
        yield calls
