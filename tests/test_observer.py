"""The observer counts what enters host memory, on any device, without knowing who copies."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests import emulated
from tests.observer import CopyObserver

emulated.install_or_skip()


def arange(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


class TestPlainCpuTensors:
    def test_counts_copies_between_host_tensors(self) -> None:
        destination = torch.empty(2, 3, dtype=torch.bfloat16)
        with CopyObserver() as seen:
            destination.copy_(arange(2, 3))

        assert (seen.copy_calls, seen.copy_bytes, seen.d2h_calls) == (1, 24, 0)
        assert seen.copies[0].source_dtype is torch.float32
        assert seen.copies[0].destination_dtype is torch.bfloat16
        assert seen.copies[0].destination_bytes == 12
        assert destination.float().tolist() == arange(2, 3).tolist()

    def test_counts_casts(self) -> None:
        with CopyObserver() as seen:
            arange(2, 3).to(torch.float64)

        assert [event.op for event in seen.copies] == ["_to_copy"]

    def test_to_that_changes_nothing_is_no_copy(self) -> None:
        with CopyObserver() as seen:
            arange(2, 3).to("cpu")

        assert seen.events == []

    def test_no_elements_are_no_copy(self) -> None:
        with CopyObserver() as seen:
            torch.empty(0, 3).copy_(arange(3))
            emulated.to_device(arange(0, 3)).cpu()

        assert seen.events == []

    def test_counts_the_list_of_foreach_copy(self) -> None:
        with CopyObserver() as seen:
            torch._foreach_copy_([torch.empty(2), torch.empty(3)], [arange(2), arange(3)])

        assert [event.source_bytes for event in seen.copies] == [8, 12]

    def test_counts_items(self) -> None:
        values = arange(3)
        with CopyObserver() as seen:
            assert values[2].item() == 2.0

        assert (seen.item_calls, seen.copy_calls) == (1, 0)


class TestDeviceTensors:
    def test_agrees_with_the_ledger_of_the_device(self) -> None:
        device = emulated.to_device(arange(3, 4, 5))
        hosts = [torch.empty(3, 4, 5), torch.empty(3, 4, 2)]
        with emulated.observe() as ledger, CopyObserver() as seen:
            device.to("cpu")
            device[1].T.cpu()
            device.to("cpu", non_blocking=True)
            hosts[0].copy_(device)
            torch._foreach_copy_(hosts, [device, device[:, :, :2]])
            float(device[2, 3, 4])

        assert seen.d2h_calls == ledger.d2h_calls == 6
        assert seen.d2h_bytes == ledger.d2h_bytes == 4 * (60 + 20 + 60 + 60 + 60 + 24)
        assert seen.item_calls == ledger.item_calls == 1
        assert [event.shape for event in seen.from_device] == [event.shape for event in ledger.d2h]
        assert [event.source_stride for event in seen.from_device] == [e.source_stride for e in ledger.d2h]

    def test_copies_that_stay_on_or_go_to_the_device_do_not_count(self) -> None:
        device = emulated.to_device(arange(2, 3))
        with CopyObserver() as seen:
            device.to(torch.float64)
            device.T.contiguous()
            arange(2, 3).to("emu")
            torch.empty(2, 3, device="emu").copy_(device)

        assert seen.events == []

    def test_helpers_of_the_emulation_do_not_count(self) -> None:
        with CopyObserver() as seen:
            emulated.to_host(emulated.to_device(arange(2, 3).T))

        assert seen.events == []

    def test_helpers_of_the_emulation_hide_from_every_mode(self) -> None:
        class Everything(TorchDispatchMode):
            calls: ClassVar[list[str]] = []

            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                self.calls.append(func.name())
                return func(*args, **(kwargs or {}))

        host = arange(2, 3)
        with Everything() as seen:
            device = emulated.to_device(host, keep_strides=False)
            emulated.to_host(device)
            assert seen.calls == []
            device.cpu()

        assert seen.calls == ["aten::_to_copy"]

    def test_host_to_host_copies_are_apart(self) -> None:
        device = emulated.to_device(arange(4))
        with CopyObserver() as seen:
            host = device.cpu()
            torch.empty(2).copy_(host[:2])

        assert (seen.copy_calls, seen.d2h_calls, seen.d2h_bytes) == (2, 1, 16)
