"""The emulated accelerator does what the tests of the transfer code rely on.

Its figures are never evidence for a rollout: they show that the counting is right, nothing about hardware.
"""

from __future__ import annotations

import copy
import gc
import threading
import time
from collections.abc import Callable

import pytest
import torch

from tests import emulated

emulated.install_or_skip()

FLOATS = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
View = Callable[[torch.Tensor], torch.Tensor]
VIEWS: dict[str, View] = {
    "whole": lambda t: t,
    "detach": lambda t: t.detach(),
    "row": lambda t: t[1],
    "rows": lambda t: t[1:3],
    "every_other_row": lambda t: t[::2],
    "gapped": lambda t: t[:, :, :2],
    "gapped_middle": lambda t: t[:, 1:3, 1:4],
    "gapped_rest": lambda t: t[:, :, 2:],
    "row_transposed": lambda t: t[1].T,
    "gapped_transposed": lambda t: t[:, :, 1:3].transpose(1, 2),
    "permuted": lambda t: t.permute(2, 0, 1),
    "narrow": lambda t: t.narrow(1, 1, 2),
    "view": lambda t: t.view(3, 20),
    "flat": lambda t: t.reshape(-1),
    "unsqueezed": lambda t: t[:, None, 2],
    "expanded": lambda t: t[:1].expand(3, 4, 5),
    "unfolded": lambda t: t[0].unfold(1, 2, 1),
    "as_strided": lambda t: t.as_strided((2, 3), (20, 5), 7),
    "last_element": lambda t: t[2, 3, 4],
}

# In the other two several elements share one place.
WRITABLE_VIEWS = [name for name in VIEWS if name not in ("expanded", "unfolded")]


def arange(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """0, 1, 2, ...: the elements differ, so a wrong slice cannot pass. Float8 rounds; so does the reference."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape).to(dtype)


def on_device(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return emulated.to_device(arange(*shape, dtype=dtype))


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Dtype, shape and every byte; of a device tensor too, without a counted copy."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    host = emulated.to_host(actual).contiguous().reshape(-1).view(torch.uint8)
    assert torch.equal(host, emulated.to_host(expected).contiguous().reshape(-1).view(torch.uint8))


class TestDevice:
    def test_is_a_device_of_its_own(self) -> None:
        tensor = on_device(2, 3)

        assert tensor.device == torch.device("emu:0")
        assert tensor.device.type != "cpu"
        assert not tensor.is_cpu
        assert type(tensor) is torch.Tensor

    def test_installs_once(self) -> None:
        emulated.install()
        emulated.install()

        assert emulated.to_host(on_device(2)).tolist() == [0.0, 1.0]

    def test_module_answers_as_device_modules_do(self) -> None:
        module = torch.get_device_module("emu")

        assert module.is_available()
        assert module.device_count() == 1
        assert module.current_device() == 0
        assert torch.get_device_module(torch.device("emu:0")) is module
        with pytest.raises(RuntimeError, match="invalid device 1: there is one emulated accelerator"):
            module.set_device(1)

    def test_seeding_torch_does_not_warn(self) -> None:
        torch.manual_seed(0)

    def test_missing_helper_skips_and_says_which(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(emulated, "_libraries", [])
        monkeypatch.delattr(torch._C._acc, "create_empty_tensor")

        with pytest.raises(emulated.EmulationUnavailable, match=r"has no torch\._C\._acc\.create_empty_tensor"):
            emulated.install()
        with pytest.raises(pytest.skip.Exception, match=r"has no torch\._C\._acc\.create_empty_tensor"):
            emulated.install_or_skip()

    def test_torch_that_behaves_otherwise_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def drop_bytes() -> None:
            raise AttributeError("'UntypedStorage' object has no attribute '_emulated_buffer'")

        setup = "_setup_privateuseone_for_python_backend"
        monkeypatch.setattr(emulated, "_libraries", [])
        monkeypatch.setattr(emulated, "_register_kernels", lambda: None)
        monkeypatch.setattr(emulated, "_self_check", drop_bytes)
        monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "privateuseone")
        monkeypatch.setattr(torch.utils.backend_registration, setup, lambda name, module: None)

        with pytest.raises(emulated.EmulationUnavailable, match=r"hosts no emulated device: .*_emulated_buffer"):
            emulated.install()

    def test_taken_slot_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(emulated, "_libraries", [])

        with pytest.raises(emulated.EmulationUnavailable, match=r"already holds 'emu'.*under two names"):
            emulated.install()

    def test_host_operand_is_refused(self) -> None:
        device = on_device(2, 3)

        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            device + arange(2, 3)
        with pytest.raises(RuntimeError, match=r"got tensors on emu and a cpu tensor of shape \(2,\)"):
            device.index_select(0, torch.tensor([1, 0]))

    def test_numpy_is_refused(self) -> None:
        with pytest.raises(TypeError, match="can't convert emu:0 device type tensor to numpy"):
            on_device(2).numpy()

    def test_pinned_memory_is_refused(self) -> None:
        """A library that pins must fall back here, as on a machine that lets it pin nothing."""
        with pytest.raises(RuntimeError, match="getPinnedMemoryAllocator"):
            torch.empty(4, pin_memory=True)

    def test_streams_and_events_do_nothing(self) -> None:
        device, stream = on_device(2), torch.Stream(device="emu")
        torch.Event(device="emu").record(stream)
        device.record_stream(stream)

        assert_same(device, arange(2))


class TestBytes:
    def test_to_device_copies(self) -> None:
        host = arange(2, 3)
        device = emulated.to_device(host)
        host.fill_(-1)

        assert_same(device, arange(2, 3))

    def test_to_host_copies(self) -> None:
        device = on_device(2, 3)
        host = emulated.to_host(device)
        host.fill_(-1)

        assert host.device.type == "cpu"
        assert_same(device, arange(2, 3))

    @pytest.mark.parametrize("non_blocking", [False, True])
    def test_host_copy_does_not_follow_the_device(self, non_blocking: bool) -> None:
        device = on_device(2, 3)
        host = device.to("cpu", non_blocking=non_blocking)
        device.fill_(-1)

        assert_same(host, arange(2, 3))
        assert host.data_ptr() != device.data_ptr()

    def test_device_copy_does_not_follow_the_host(self) -> None:
        host = arange(2, 3)
        device = host.to("emu")
        host.fill_(-1)

        assert_same(device, arange(2, 3))

    def test_fallback_result_has_bytes_of_its_own(self) -> None:
        device = on_device(2, 3)
        doubled = device * 2
        device.fill_(-1)

        assert_same(doubled, arange(2, 3) * 2)

    @pytest.mark.parametrize("name", VIEWS)
    def test_to_device_keeps_strides(self, name: str) -> None:
        host = VIEWS[name](arange(3, 4, 5))
        device = emulated.to_device(host)

        assert device.stride() == host.stride()
        assert device.is_contiguous() == host.is_contiguous()
        assert_same(device, host)

    @pytest.mark.parametrize("name", VIEWS)
    def test_to_device_packs_when_asked(self, name: str) -> None:
        host = VIEWS[name](arange(3, 4, 5))
        device = emulated.to_device(host, keep_strides=False)

        assert device.is_contiguous()
        assert_same(device, host)

    @pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool])
    def test_dtypes(self, dtype: torch.dtype) -> None:
        assert_same(on_device(3, 4, dtype=dtype), arange(3, 4, dtype=dtype))
        assert_same(on_device(3, 4, dtype=dtype).cpu(), arange(3, 4, dtype=dtype))

    def test_empty_memory_is_poisoned(self) -> None:
        tensor = torch.empty(3, dtype=torch.uint8, device="emu")

        assert emulated.to_host(tensor).tolist() == [emulated.POISON] * 3

    def test_no_elements(self) -> None:
        device = on_device(0, 3)

        assert device.cpu().shape == (0, 3)
        assert (device * 2).shape == (0, 3)

    def test_zero_dimensions(self) -> None:
        device = emulated.to_device(torch.tensor(7.0))

        assert device.shape == ()
        assert_same(device.cpu(), torch.tensor(7.0))


class TestViews:
    @pytest.mark.parametrize("name", VIEWS)
    def test_layout_and_values_are_those_of_the_cpu(self, name: str) -> None:
        base = on_device(3, 4, 5)
        view, expected = VIEWS[name](base), VIEWS[name](arange(3, 4, 5))

        assert view.device == base.device
        assert view.stride() == expected.stride()
        assert view.storage_offset() == expected.storage_offset()
        assert view.is_contiguous() == expected.is_contiguous()
        assert view.numel() == expected.numel()
        assert view.data_ptr() == base.data_ptr() + 4 * expected.storage_offset()
        assert view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
        assert_same(view, expected)

    @pytest.mark.parametrize("name", VIEWS)
    def test_sees_its_base_change(self, name: str) -> None:
        base, expected = on_device(3, 4, 5), arange(3, 4, 5)
        view = VIEWS[name](base)
        base.mul_(2)
        base[1, 1:3] = -5.0
        expected.mul_(2)
        expected[1, 1:3] = -5.0

        assert_same(view, VIEWS[name](expected))

    @pytest.mark.parametrize("name", WRITABLE_VIEWS)
    def test_writes_through_to_its_base(self, name: str) -> None:
        base, expected = on_device(3, 4, 5), arange(3, 4, 5)
        VIEWS[name](base).add_(100)
        VIEWS[name](expected).add_(100)

        assert_same(base, expected)

    @pytest.mark.parametrize("name", VIEWS)
    def test_contiguous_and_clone(self, name: str) -> None:
        view, expected = VIEWS[name](on_device(3, 4, 5)), VIEWS[name](arange(3, 4, 5))

        assert view.contiguous().is_contiguous()
        assert_same(view.contiguous(), expected)
        assert view.clone().stride() == expected.clone().stride()
        assert_same(view.clone(), expected)

    @pytest.mark.parametrize("name", WRITABLE_VIEWS)
    def test_copied_into_in_place(self, name: str) -> None:
        base, expected = on_device(3, 4, 5), arange(3, 4, 5)
        source = VIEWS[name](arange(3, 4, 5)).neg()
        VIEWS[name](base).copy_(source)
        VIEWS[name](expected).copy_(source)

        assert_same(base, expected)

    def test_view_of_another_dtype(self) -> None:
        assert_same(on_device(2, 3).view(torch.int32), arange(2, 3).view(torch.int32))

    def test_view_that_a_cpu_kernel_makes(self) -> None:
        base = on_device(3, 2)
        pairs = torch.view_as_complex(base)
        base.mul_(2)

        assert_same(pairs, torch.view_as_complex(arange(3, 2) * 2))

    def test_split_unbind_chunk(self) -> None:
        device, host = on_device(4, 6), arange(4, 6)

        for actual, expected in zip(device.unbind(0), host.unbind(0), strict=True):
            assert_same(actual, expected)
        for actual, expected in zip(device.chunk(2, dim=1), host.chunk(2, dim=1), strict=True):
            assert_same(actual, expected)
        for actual, expected in zip(device.split([1, 3]), host.split([1, 3]), strict=True):
            assert_same(actual, expected)


class TestOperators:
    @pytest.mark.parametrize("name", VIEWS)
    def test_empty_like_on_the_host_keeps_strides(self, name: str) -> None:
        view, expected = VIEWS[name](on_device(3, 4, 5)), VIEWS[name](arange(3, 4, 5))
        host = torch.empty_like(view, device="cpu")

        assert host.device.type == "cpu"
        assert host.stride() == torch.empty_like(expected).stride()

    def test_factories(self) -> None:
        assert_same(torch.zeros(2, 3, device="emu"), torch.zeros(2, 3))
        assert_same(torch.ones(2, device="emu", dtype=torch.int64), torch.ones(2, dtype=torch.int64))
        assert_same(torch.full((2, 2), 7.0, device="emu"), torch.full((2, 2), 7.0))
        assert_same(torch.arange(5, device="emu"), torch.arange(5))
        assert_same(torch.tensor([1, 2], device="emu"), torch.tensor([1, 2]))
        assert_same(torch.zeros_like(on_device(2, 3)), torch.zeros(2, 3))
        assert torch.empty(2, 3, device="emu").shape == (2, 3)
        assert torch.empty_strided((2, 3), (1, 2), device="emu").stride() == (1, 2)
        assert on_device(2, 3).new_zeros(4).device.type == "emu"

    @pytest.mark.parametrize("to_dtype", FLOATS)
    @pytest.mark.parametrize("from_dtype", FLOATS)
    def test_casts_on_the_device(self, from_dtype: torch.dtype, to_dtype: torch.dtype) -> None:
        device = on_device(3, 4, dtype=from_dtype)

        assert_same(device.to(to_dtype), arange(3, 4, dtype=from_dtype).to(to_dtype))
        assert device.to(to_dtype).device.type == "emu"

    def test_float_of_the_same_dtype_is_itself(self) -> None:
        device = on_device(2)

        assert device.float() is device

    def test_in_place(self) -> None:
        device = on_device(2, 3)
        assert device.add_(1).mul_(3) is device
        assert_same(device, (arange(2, 3) + 1) * 3)
        assert device.fill_(4) is device
        assert_same(device, torch.full((2, 3), 4.0))
        assert_same(device.zero_(), torch.zeros(2, 3))

    def test_operator_called_by_name_returns_what_it_wrote_to(self) -> None:
        device, out = on_device(2, 3), torch.empty(0, device="emu")
        before = emulated.memory_allocated()
        emulated.reset_peak()

        assert torch.ops.aten.fill_.Scalar(device, 4) is device
        assert torch.ops.aten.add.out(device, device, out=out) is out
        assert emulated.memory_allocated() - before == 24
        assert emulated.max_memory_allocated() - before == 24  # its bytes are counted once
        assert_same(out, torch.full((2, 3), 8.0))

    def test_stack_and_cat(self) -> None:
        steps = on_device(5)

        assert_same(torch.stack([steps[3], steps[1]]), torch.tensor([3.0, 1.0]))
        assert_same(torch.cat([steps[3:], steps[:1]]), torch.tensor([3.0, 4.0, 0.0]))
        assert_same(torch.cat([steps[1].reshape(1), steps[4].reshape(1)]), torch.tensor([1.0, 4.0]))

    def test_index_select_and_index_copy(self) -> None:
        device, order = on_device(3, 4), torch.tensor([2, 0])
        on_device_order = emulated.to_device(order)

        assert_same(device.index_select(0, on_device_order), arange(3, 4)[order])
        device.index_copy_(0, on_device_order, on_device(2, 4))
        assert_same(device, arange(3, 4).index_copy_(0, order, arange(2, 4)))

    def test_host_index_is_moved_once(self) -> None:
        device = on_device(3, 4)
        with emulated.observe() as seen:
            picked = device[torch.tensor([2, 0])]

        assert_same(picked, arange(3, 4)[[2, 0]])
        assert (seen.h2d_calls, seen.h2d_bytes) == (1, 16)

        with emulated.observe() as seen:
            device[torch.tensor([2, 0])] = -1.0
        assert_same(device, torch.tensor([[-1.0] * 4, [4.0, 5, 6, 7], [-1.0] * 4]))
        assert (seen.h2d_calls, seen.h2d_bytes) == (1, 16)

    def test_out_argument_grows(self) -> None:
        out = torch.empty(0, device="emu")
        torch.add(on_device(2, 3), 1, out=out)

        assert_same(out, arange(2, 3) + 1)

    def test_resize(self) -> None:
        device = on_device(4)
        device.resize_(2)
        assert_same(device, arange(2))
        device.resize_(2, 3)
        assert_same(device[0], arange(3))  # the bytes were still there

        assert emulated.to_host(device[1, 1:].view(torch.uint8)).tolist() == [emulated.POISON] * 8

    def test_deepcopy_is_a_copy_on_the_device(self) -> None:
        device = on_device(3, 4)[:, 1:3]
        copied = copy.deepcopy(device)
        device.zero_()

        assert copied.device.type == "emu"
        assert copied.stride() == (4, 1)
        assert_same(copied, arange(3, 4)[:, 1:3])

    def test_prints(self) -> None:
        assert repr(on_device(2)) == "tensor([0., 1.], device='emu:0')"

    def test_inference_mode(self) -> None:
        device = on_device(2, 3)
        with torch.inference_mode():
            assert_same(device[1].cpu(), arange(2, 3)[1])

    def test_backward(self) -> None:
        parameter = torch.nn.Parameter(on_device(2, 3))
        (parameter[1] ** 2).sum().backward()

        assert parameter.grad is not None
        assert parameter.grad.device.type == "emu"
        assert_same(parameter.grad, torch.tensor([[0.0, 0, 0], [6, 8, 10]]))


LAYOUTS: dict[str, View] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, 2).contiguous().transpose(0, 2),
    "gapped": lambda t: torch.cat([t.float(), -t.float()], dim=2).to(t.dtype)[:, :, : t.shape[2]],
}


class TestCopy:
    @pytest.mark.parametrize("non_blocking", [False, True])
    @pytest.mark.parametrize("destination_layout", LAYOUTS)
    @pytest.mark.parametrize("source_layout", LAYOUTS)
    @pytest.mark.parametrize(
        ("source_device", "destination_device"),
        [("emu", "cpu"), ("cpu", "emu"), ("emu", "emu"), ("cpu", "cpu")],
    )
    @pytest.mark.parametrize(
        ("source_dtype", "destination_dtype"),
        [
            (torch.float32, torch.float32),
            (torch.bfloat16, torch.float32),
            (torch.float32, torch.bfloat16),
            (torch.float64, torch.float16),
            (torch.float8_e4m3fn, torch.float32),
        ],
    )
    def test_every_direction_dtype_and_layout(
        self,
        source_device: str,
        destination_device: str,
        source_layout: str,
        destination_layout: str,
        source_dtype: torch.dtype,
        destination_dtype: torch.dtype,
        non_blocking: bool,
    ) -> None:
        host_source = LAYOUTS[source_layout](arange(2, 3, 4, dtype=source_dtype))
        source = emulated.to_device(host_source) if source_device == "emu" else host_source
        destination = LAYOUTS[destination_layout](torch.zeros(2, 3, 4, dtype=destination_dtype))
        if destination_device == "emu":
            destination = emulated.to_device(destination)
        stride = destination.stride()

        with emulated.observe() as seen:
            returned = destination.copy_(source, non_blocking=non_blocking)

        assert returned is destination
        assert destination.stride() == stride
        assert_same(destination, host_source.to(destination_dtype))
        counted = (seen.d2h_calls, seen.h2d_calls, seen.d2d_calls)
        assert (
            counted
            == {
                ("emu", "cpu"): (1, 0, 0),
                ("cpu", "emu"): (0, 1, 0),
                ("emu", "emu"): (0, 0, 1),
                ("cpu", "cpu"): (0, 0, 0),
            }[source_device, destination_device]
        )

    @pytest.mark.parametrize("name", VIEWS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("non_blocking", [False, True])
    def test_to_cpu_is_the_cpus_own_to(self, name: str, dtype: torch.dtype, non_blocking: bool) -> None:
        view, expected = VIEWS[name](on_device(3, 4, 5)), VIEWS[name](arange(3, 4, 5))
        with emulated.observe() as seen:
            host = view.to("cpu", dtype, non_blocking=non_blocking)

        assert seen.d2h_calls == 1
        assert host.stride() == expected.to(dtype, copy=True).stride()
        assert_same(host, expected.to(dtype))

    def test_one_to_many_broadcasts(self) -> None:
        host = torch.empty(3, 2)
        with emulated.observe() as seen:
            host.copy_(on_device(2))

        assert_same(host, arange(2).expand(3, 2))
        assert seen.d2h_bytes == 24  # broadcast on the device: the expanded source crosses


class TestLedger:
    def test_counts_each_copy_to_the_host(self) -> None:
        device = on_device(2, 3, dtype=torch.bfloat16)
        host = torch.empty(2, 3, dtype=torch.bfloat16)
        with emulated.observe() as seen:
            device.to("cpu")
            device[1].cpu()
            host.copy_(device)

        assert seen.d2h_calls == 3
        assert [event.nbytes for event in seen.d2h] == [12, 6, 12]
        assert seen.d2h_bytes == 30
        assert [event.op for event in seen.d2h] == ["_to_copy", "_to_copy", "copy_"]
        assert (seen.h2d_calls, seen.item_calls, seen.d2d_calls, seen.synchronizes) == (0, 0, 0, 0)

    def test_event_says_what_crossed(self) -> None:
        device = on_device(3, 4, 5, dtype=torch.bfloat16)[:, :, 1:3]
        with emulated.observe() as seen:
            torch.empty(3, 4, 2).copy_(device)

        assert seen.events == [
            emulated.Transfer(
                direction="d2h",
                kind="copy",
                op="copy_",
                nbytes=48,
                source_dtype=torch.bfloat16,
                destination_dtype=torch.float32,
                shape=(3, 4, 2),
                source_stride=(20, 5, 1),
                temporary_bytes=48,
                non_blocking=False,
                thread=threading.current_thread().name,
            )
        ]
        assert seen.events[0].needs_device_temporary

    @pytest.mark.parametrize(("non_blocking", "nbytes"), [(False, 12), (True, 24)])
    def test_blocking_casts_on_the_host_and_non_blocking_on_the_device(self, non_blocking: bool, nbytes: int) -> None:
        device = on_device(2, 3, dtype=torch.bfloat16)
        with emulated.observe() as seen:
            device.to("cpu", torch.float32, non_blocking=non_blocking)

        assert seen.d2h_bytes == nbytes
        assert seen.temporary_bytes == (24 if non_blocking else 0)

    def test_host_to_device_is_apart(self) -> None:
        with emulated.observe() as seen:
            arange(2, 3).to("emu")
            torch.tensor([1, 2], device="emu")
            torch.empty(3, device="emu").copy_(arange(3))

        assert (seen.h2d_calls, seen.h2d_bytes, seen.d2h_calls) == (3, 24 + 16 + 12, 0)

    def test_copies_within_the_device_do_not_cross(self) -> None:
        device = on_device(2, 3)
        with emulated.observe() as seen:
            device.T.contiguous()
            device.clone()
            device.to(torch.float64)
            device.add_(1)

        assert (seen.d2h_calls, seen.h2d_calls, seen.d2d_calls) == (0, 0, 3)

    def test_items(self) -> None:
        device = on_device(2, 3)
        with emulated.observe() as seen:
            values = (device[1, 2].item(), float(device[0, 1]), int(device[1, :1].long()), bool(device[0, 0]))

        assert values == (5.0, 1.0, 3, False)
        assert (seen.item_calls, seen.d2h_calls) == (4, 0)
        assert [event.nbytes for event in seen.items] == [4, 4, 8, 4]

    def test_item_of_many_is_refused_and_not_counted(self) -> None:
        device = on_device(2)
        with (
            emulated.observe() as seen,
            pytest.raises(RuntimeError, match="a Tensor with 2 elements cannot be converted to Scalar"),
        ):
            device.item()

        assert seen.item_calls == 0

    def test_equal_is_an_item(self) -> None:
        device = on_device(2, 3)
        with emulated.observe() as seen:
            assert torch.equal(device, on_device(2, 3))
            assert not torch.equal(device, on_device(2, 3).T.contiguous().view(2, 3))

        assert (seen.item_calls, seen.d2h_calls) == (2, 0)

    def test_foreach_copy_counts_its_list(self) -> None:
        hosts = [torch.empty(2), torch.empty(3), torch.empty(4)]
        with emulated.observe() as seen:
            torch._foreach_copy_(hosts, [on_device(2), on_device(3), on_device(4)])

        assert [event.nbytes for event in seen.d2h] == [8, 12, 16]
        assert_same(hosts[2], arange(4))

    def test_whole_storage_counts_once(self) -> None:
        host = torch.UntypedStorage(24)
        with emulated.observe() as seen:
            host.copy_(on_device(2, 3)[1].untyped_storage())

        assert (seen.d2h_calls, seen.d2h_bytes) == (1, 24)
        assert_same(torch.empty(0).set_(host), arange(6))

    def test_tolist_counts(self) -> None:
        with emulated.observe() as seen:
            assert on_device(3).tolist() == [0.0, 1.0, 2.0]

        assert seen.d2h_calls == 1

    def test_peeking_and_setting_up_do_not_count(self) -> None:
        with emulated.observe() as seen:
            emulated.to_host(on_device(2, 3).T)

        assert seen.events == []

    def test_no_elements_do_not_cross(self) -> None:
        with emulated.observe() as seen:
            on_device(0, 3).cpu()

        assert seen.events == []

    def test_synchronize_counts(self) -> None:
        with emulated.observe() as seen:
            torch.get_device_module("emu").synchronize()
            torch.emu.synchronize(torch.device("emu:0"))
        torch.emu.synchronize()

        assert seen.synchronizes == 2

    def test_sees_other_threads(self) -> None:
        device = on_device(2)
        writer = threading.Thread(target=device.cpu, name="writer")
        with emulated.observe() as seen:
            writer.start()
            writer.join()

        assert [event.thread for event in seen.d2h] == ["writer"]

    def test_ledgers_nest(self) -> None:
        device = on_device(2)
        with emulated.observe() as outer:
            with emulated.observe() as inner:
                device.cpu()
            device.cpu()
        device.cpu()

        assert (outer.d2h_calls, inner.d2h_calls) == (2, 1)

    def test_equal_ledgers_close_apart(self) -> None:
        device = on_device(2)
        with emulated.observe() as outer:
            with emulated.observe():
                pass
            device.cpu()

        assert outer.d2h_calls == 1

    def test_non_contiguous_parameter_slices_as_a_trainer_saves_them(self) -> None:
        weight = torch.nn.Parameter(on_device(2, 4, 6, dtype=torch.bfloat16))
        with emulated.observe() as seen:
            experts = [weight.detach()[e, :, :3].T.to(torch.float32).cpu() for e in range(2)]

        for expert, host in enumerate(experts):
            assert_same(host, arange(2, 4, 6, dtype=torch.bfloat16)[expert, :, :3].T.float())
        assert (seen.d2h_calls, seen.d2h_bytes) == (2, 2 * 12 * 4)


class TestTemporaries:
    """Which copies to the host need a second buffer on the device, by the rules of CUDA's copy routine."""

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("whole", 0),
            ("row", 0),
            ("rows", 0),
            ("row_transposed", 0),  # the host takes the transposed layout over: one memcpy
            ("permuted", 0),
            ("gapped", 3 * 4 * 2 * 4),
            ("gapped_transposed", 3 * 4 * 2 * 4),
            ("every_other_row", 2 * 4 * 5 * 4),
            ("narrow", 3 * 2 * 5 * 4),
            ("expanded", 3 * 4 * 5 * 4),
            ("last_element", 0),
        ],
    )
    def test_of_a_copy_that_keeps_the_layout(self, name: str, expected: int) -> None:
        view = VIEWS[name](on_device(3, 4, 5))
        emulated.reset_peak()
        before = emulated.memory_allocated()
        with emulated.observe() as seen:
            view.to("cpu")

        assert seen.temporary_bytes == expected
        assert emulated.max_memory_allocated() - before == expected
        assert emulated.memory_allocated() == before

    def test_of_a_transposed_source_into_a_contiguous_host_tensor(self) -> None:
        device = on_device(3, 4, 5).permute(2, 0, 1)
        with emulated.observe() as seen:
            torch.empty(5, 3, 4).copy_(device)

        assert seen.temporary_bytes == 240

    def test_none_for_a_contiguous_source_into_any_host_layout(self) -> None:
        with emulated.observe() as seen:
            torch.empty(5, 4, 3).transpose(1, 2).copy_(on_device(5, 3, 4))

        assert seen.temporary_bytes == 0

    def test_of_casts_on_the_device(self) -> None:
        device = on_device(3, 4, 5, dtype=torch.bfloat16)
        cases = [device, device[:, :, :2], device.permute(2, 0, 1)]
        with emulated.observe() as seen:
            for source in cases:
                torch.empty(source.shape).copy_(source, non_blocking=True)

        # The cast closes the gaps by itself, but keeps a transposed layout: that one needs two temporaries.
        assert [event.temporary_bytes for event in seen.d2h] == [240, 96, 480]

    def test_of_copies_to_the_device(self) -> None:
        cases = [
            (torch.zeros(3, 4, device="emu"), arange(3, 4), False, 0),
            (torch.zeros(3, 4, device="emu"), arange(4, 3).T, False, 0),
            (torch.zeros(3, 8, device="emu")[:, :4], arange(3, 4), False, 48),
            (torch.zeros(3, 4, device="emu"), arange(3, 4, dtype=torch.bfloat16), False, 0),
            (torch.zeros(3, 4, device="emu"), arange(3, 4, dtype=torch.bfloat16), True, 24),
        ]
        for destination, source, non_blocking, expected in cases:
            with emulated.observe() as seen:
                destination.copy_(source, non_blocking=non_blocking)
            assert seen.temporary_bytes == expected


class TestMemory:
    @pytest.fixture(autouse=True)
    def _settle(self) -> None:
        gc.collect()
        emulated.reset_peak()

    def test_follows_what_lives(self) -> None:
        before = emulated.memory_allocated()
        device = on_device(10, 10)
        assert emulated.memory_allocated() - before == 400

        view = device[3]
        del device
        assert emulated.memory_allocated() - before == 400  # a view keeps the whole storage
        assert_same(view, arange(10, 10)[3])

        del view
        assert emulated.memory_allocated() == before

    def test_a_view_costs_nothing(self) -> None:
        device = on_device(10, 10)
        before = emulated.memory_allocated()
        views = [device[e] for e in range(10)]

        assert len(views) == 10
        assert emulated.memory_allocated() == before

    def test_parameter_keeps_its_bytes(self) -> None:
        before = emulated.memory_allocated()
        parameter = torch.nn.Parameter(on_device(10, 10))
        gc.collect()

        assert emulated.memory_allocated() - before == 400
        assert_same(parameter.detach(), arange(10, 10))

    def test_peak_keeps_what_is_gone(self) -> None:
        before = emulated.memory_allocated()
        on_device(10, 10)
        on_device(5, 5)
        assert emulated.memory_allocated() == before
        assert emulated.max_memory_allocated() - before == 400

        emulated.reset_peak()
        assert emulated.max_memory_allocated() == before

    def test_device_cast_and_contiguous_are_allocations(self) -> None:
        device = on_device(4, 5, dtype=torch.bfloat16)
        before = emulated.memory_allocated()
        kept = device.T.contiguous(), device.float(), device * 2

        assert len(kept) == 3
        assert emulated.memory_allocated() - before == 40 + 80 + 40

    def test_gaps_count(self) -> None:
        before = emulated.memory_allocated()
        device = emulated.to_device(arange(3, 4)[:, :2])

        assert device.stride() == (4, 1)
        assert emulated.memory_allocated() - before == 10 * 4  # from the first to the last element

    def test_failed_copy_frees_its_temporary(self) -> None:
        device = on_device(4, 4)[:, :2]
        before = emulated.memory_allocated()
        with pytest.raises(RuntimeError, match="must match"):
            torch.empty(3, 3).copy_(device)

        assert emulated.memory_allocated() == before

    def test_module_reports_the_same(self) -> None:
        assert torch.emu.memory_allocated() == emulated.memory_allocated()
        assert torch.emu.max_memory_allocated() == emulated.max_memory_allocated()


def fastest_seconds(action: Callable[[], object], tries: int = 15) -> float:
    """The fastest of several: other work on the machine only ever adds time."""
    seconds = []
    for _ in range(tries):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


class TestCost:
    def test_adds_up_from_calls_and_bytes(self) -> None:
        device = on_device(10, 25)  # 1,000 bytes

        def save() -> None:
            for _ in range(3):
                device.cpu()

        bare = fastest_seconds(save)
        with emulated.cost(per_call_seconds=0.001, per_byte_seconds=2e-6):
            charged = fastest_seconds(save)

        assert 0.009 <= charged < 0.009 + bare + 0.001

    def test_items_pay_too(self) -> None:
        device = on_device(3)
        with emulated.cost(per_call_seconds=0.002):
            assert fastest_seconds(device[1].item) >= 0.002

    def test_copies_to_and_within_the_device_are_free(self) -> None:
        device, host = on_device(3), arange(3)
        with emulated.cost(per_call_seconds=0.5):
            start = time.perf_counter()
            host.to("emu")
            device.clone()
            assert time.perf_counter() - start < 0.4

    def test_ends_with_its_block(self) -> None:
        device = on_device(3)
        with emulated.cost(per_call_seconds=0.5):
            pass

        assert fastest_seconds(device.cpu) < 0.4

    def test_negative_cost_is_refused(self) -> None:
        with (
            pytest.raises(ValueError, match="a cost is never negative: per_call_seconds=-1"),
            emulated.cost(-1),
        ):
            pass


class TestFault:
    def test_hits_the_nth_copy_before_any_byte_moves(self) -> None:
        device, hosts = on_device(3), [torch.full((3,), -1.0) for _ in range(3)]
        with emulated.observe() as seen, emulated.fail_at(2, OSError("link down")):
            hosts[0].copy_(device)
            with pytest.raises(OSError, match="link down"):
                hosts[1].copy_(device)
            hosts[2].copy_(device)

        assert [host.tolist() for host in hosts] == [[0, 1, 2], [-1, -1, -1], [0, 1, 2]]
        assert seen.d2h_calls == 2

    @pytest.mark.parametrize("exception", [KeyboardInterrupt("stop"), lambda: KeyboardInterrupt("stop")])
    def test_takes_any_exception_or_what_makes_one(
        self, exception: BaseException | Callable[[], BaseException]
    ) -> None:
        device = on_device(3)
        with emulated.fail_at(1, exception), pytest.raises(KeyboardInterrupt, match="stop"):
            device.cpu()

    def test_class_is_a_factory(self) -> None:
        with emulated.fail_at(1, MemoryError), pytest.raises(MemoryError):
            on_device(3).cpu()

    def test_only_copies_to_the_host_count(self) -> None:
        device = on_device(3)
        with emulated.fail_at(1, OSError("link down")):
            arange(3).to("emu")
            device.clone()
            device[1].item()
            emulated.to_host(device)
            with pytest.raises(OSError, match="link down"):
                device.cpu()

    def test_ends_with_its_block(self) -> None:
        device = on_device(3)
        with emulated.fail_at(1, OSError("link down")):
            pass

        assert_same(device.cpu(), arange(3))

    def test_zeroth_copy_is_refused(self) -> None:
        refused = pytest.raises(ValueError, match="n is 0; the first copy from now is n=1")
        with refused, emulated.fail_at(0, OSError):
            pass


def adamw_steps(parameter: torch.nn.Parameter, move: View, **settings: object) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW([parameter], lr=0.1, weight_decay=0.01, **settings)  # type: ignore[arg-type]
    for step in range(3):
        parameter.grad = move(arange(2, 3, 4).flip(0) - step)
        optimizer.step()
    return optimizer


class TestTraining:
    def test_parameter(self) -> None:
        parameter = torch.nn.Parameter(on_device(2, 3, 4))

        assert isinstance(parameter, torch.nn.Parameter)
        assert parameter.device.type == "emu"
        assert parameter.requires_grad
        assert parameter.is_leaf
        assert not parameter.detach().requires_grad
        assert parameter.data.data_ptr() == parameter.data_ptr()
        assert_same(parameter[1], arange(2, 3, 4)[1])

    def test_module_moves(self) -> None:
        linear = torch.nn.Linear(3, 2).to("emu")

        assert {value.device.type for value in linear.state_dict().values()} == {"emu"}
        assert linear(on_device(4, 3)).shape == (4, 2)

    @pytest.mark.parametrize(
        "settings",
        [
            {"foreach": False, "fused": False},
            {"foreach": True},
            {"fused": True},
            {"foreach": False, "fused": False, "amsgrad": True},
            {},
        ],
    )
    def test_adamw_steps_are_the_cpus_bit_for_bit(self, settings: dict[str, bool]) -> None:
        on_host = torch.nn.Parameter(arange(2, 3, 4))
        on_emu = torch.nn.Parameter(on_device(2, 3, 4))
        expected = adamw_steps(on_host, lambda gradient: gradient, **settings).state[on_host]
        with emulated.observe() as seen:
            state = adamw_steps(on_emu, emulated.to_device, **settings).state[on_emu]

        assert_same(on_emu.detach(), on_host.detach())
        for name in ("exp_avg", "exp_avg_sq"):
            assert state[name].device.type == "emu"
            assert_same(state[name], expected[name])
        assert float(state["step"]) == 3.0
        assert seen.d2h_calls == 0

    def test_capturable_adamw_keeps_its_step_on_the_device(self) -> None:
        parameter = torch.nn.Parameter(on_device(2, 3, 4))
        state = adamw_steps(parameter, emulated.to_device, foreach=False, capturable=True).state[parameter]

        assert state["step"].device.type == "emu"
        with emulated.observe() as seen:
            assert state["step"].item() == 3.0
        assert seen.item_calls == 1

    def test_optimizer_state_goes_round(self) -> None:
        parameter = torch.nn.Parameter(on_device(2, 3, 4))
        optimizer = adamw_steps(parameter, emulated.to_device, foreach=False)
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.state[parameter]["exp_avg"].zero_()
        optimizer.load_state_dict(saved)

        assert optimizer.state[parameter]["exp_avg"].device.type == "emu"
        assert_same(optimizer.state[parameter]["exp_avg"], saved["state"][0]["exp_avg"])
        assert emulated.to_host(saved["state"][0]["exp_avg"]).abs().sum() > 0
