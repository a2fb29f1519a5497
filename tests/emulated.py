"""An accelerator made of host memory, so that device-to-host code can be tested without a GPU.

`install()` registers a torch device named "emu". Its tensors are plain `torch.Tensor`s with real shapes,
strides, storages and bytes; the bytes live in buffers of their own, never shared with a CPU tensor that a
test can reach. Every copy over the device boundary goes through one function here, which counts it, can
charge it a known cost, and can make it fail. Operators without an entry here run the CPU's kernel over
the same bytes.

This is a test tool. Its figures (seconds, bytes allocated, calls) check that the code counts and decides
rightly. They are never evidence for a rollout: nothing here is as fast, as asynchronous or as large as an
accelerator, and every operation is done when it returns.

What a copy needs is modelled after CUDA's own copy routine. A copy between equal dtypes whose two sides
have one dense layout needs no temporary. Any other copy first makes a contiguous source on the side that
it leaves (for a gapped slice: a temporary on the device), and changes dtype on the host if it blocks, on
the device if not.
"""

from __future__ import annotations

import gc
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

NAME = "emu"

Direction = Literal["d2h", "h2d", "d2d"]
Kind = Literal["copy", "item"]

# Bytes of fresh `empty` memory: whoever reads what nobody wrote sees this pattern, not a lucky zero.
POISON = 0xA5


class EmulationUnavailable(RuntimeError):
    """This torch cannot host the emulated accelerator; tests that need it skip with this text."""


# ----------------------------------------------------------------------------------------------------------
# What is watched: memory, transfers, injected cost and faults
# ----------------------------------------------------------------------------------------------------------


class _Memory:
    """Bytes of device buffers alive, now and at most."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may run inside `add`, on the same thread
        self.current_bytes = 0
        self.peak_bytes = 0

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.current_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.current_bytes)

    def remove(self, nbytes: int) -> None:
        with self._lock:
            self.current_bytes -= nbytes

    def reset_peak(self) -> None:
        with self._lock:
            self.peak_bytes = self.current_bytes

    @contextmanager
    def borrowed(self, nbytes: int) -> Iterator[None]:
        """A temporary that lives for the length of one operation."""
        self.add(nbytes)
        try:
            yield
        finally:
            self.remove(nbytes)


_memory = _Memory()


def memory_allocated() -> int:
    """Bytes of device storages alive now, unrounded. Never evidence for a rollout."""
    return _memory.current_bytes


def max_memory_allocated() -> int:
    """Most bytes alive at once since the last `reset_peak`, temporaries of copies included."""
    return _memory.peak_bytes


def reset_peak() -> None:
    """Start a new peak from what is alive now."""
    _memory.reset_peak()


@dataclass(frozen=True)
class Transfer:
    """One crossing of the device boundary (or, for "d2d", one copy within the device)."""

    direction: Direction
    kind: Kind
    op: str
    nbytes: int  # what crosses: in the source's dtype, or in the destination's where the source side converts
    source_dtype: torch.dtype
    destination_dtype: torch.dtype | None  # None where a Python number came out
    shape: tuple[int, ...]
    source_stride: tuple[int, ...]
    temporary_bytes: int  # on the device
    non_blocking: bool
    thread: str

    @property
    def needs_device_temporary(self) -> bool:
        """Whether the copy needed memory on the device beyond its source and destination."""
        return self.temporary_bytes > 0


@dataclass
class Ledger:
    """What crossed the boundary while `observe()` was open. Never evidence for a rollout."""

    events: list[Transfer] = field(default_factory=list)
    synchronizes: int = 0

    def _of(self, direction: str, kind: str) -> list[Transfer]:
        return [event for event in self.events if event.direction == direction and event.kind == kind]

    @property
    def d2h(self) -> list[Transfer]:
        """Copies from the device to the host, in order; items are apart."""
        return self._of("d2h", "copy")

    @property
    def items(self) -> list[Transfer]:
        """Single values that became Python numbers (`.item()`, `float(t)`, `torch.equal`)."""
        return self._of("d2h", "item")

    @property
    def h2d(self) -> list[Transfer]:
        """Copies from the host to the device, in order."""
        return self._of("h2d", "copy")

    @property
    def d2d(self) -> list[Transfer]:
        """Copies within the device (contiguous, clone, dtype casts): none of them crosses the boundary."""
        return self._of("d2d", "copy")

    @property
    def d2h_calls(self) -> int:
        return len(self.d2h)

    @property
    def d2h_bytes(self) -> int:
        return sum(event.nbytes for event in self.d2h)

    @property
    def item_calls(self) -> int:
        return len(self.items)

    @property
    def h2d_calls(self) -> int:
        return len(self.h2d)

    @property
    def h2d_bytes(self) -> int:
        return sum(event.nbytes for event in self.h2d)

    @property
    def d2d_calls(self) -> int:
        return len(self.d2d)

    @property
    def temporary_bytes(self) -> int:
        """Sum over all copies of the device temporaries that they needed."""
        return sum(event.temporary_bytes for event in self.events)


class _Fault:
    """Fails the n-th copy from now, once."""

    def __init__(self, n: int, exception: BaseException | Callable[[], BaseException]) -> None:
        if n < 1:
            raise ValueError(f"n is {n}; the first copy from now is n=1")
        self.left = n
        self.exception = exception

    def raise_if_due(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.exception if isinstance(self.exception, BaseException) else self.exception()


@dataclass(frozen=True)
class _Cost:
    per_call_seconds: float
    per_byte_seconds: float

    def seconds(self, nbytes: int) -> float:
        return self.per_call_seconds + nbytes * self.per_byte_seconds


# Seen by every thread, unlike torch's own modes: a writer thread that copies is counted too.
_lock = threading.RLock()
_ledgers: list[Ledger] = []
_costs: list[_Cost] = []
_faults: list[_Fault] = []


@contextmanager
def _listed(items: list[Any], item: Any) -> Iterator[Any]:
    with _lock:
        items.append(item)
    try:
        yield item
    finally:
        with _lock:
            # By identity: two open ledgers with equal content are equal to `list.remove`.
            items[:] = [other for other in items if other is not item]


@contextmanager
def observe() -> Iterator[Ledger]:
    """Record every transfer at the boundary, from any thread, whoever asks for it."""
    with _listed(_ledgers, Ledger()) as ledger:
        yield ledger


@contextmanager
def cost(per_call_seconds: float = 0.0, per_byte_seconds: float = 0.0) -> Iterator[None]:
    """Make each transfer to the host, copy or item, last this much longer. Never evidence for a rollout."""
    if per_call_seconds < 0 or per_byte_seconds < 0:
        raise ValueError(f"a cost is never negative: {per_call_seconds=}, {per_byte_seconds=}")
    with _listed(_costs, _Cost(per_call_seconds, per_byte_seconds)):
        yield


@contextmanager
def fail_at(n: int, exception: BaseException | Callable[[], BaseException]) -> Iterator[None]:
    """Raise `exception` (or what it makes) at the n-th device-to-host copy from now, before any byte moves.

    Later copies pass, so that clean-up can be watched. Items are not counted.
    """
    with _listed(_faults, _Fault(n, exception)):
        yield


def _wait(seconds: float) -> None:
    """Sleep for most of it, then spin: on a busy machine a sleep is late by some hundred microseconds."""
    end = time.perf_counter() + seconds
    if seconds > 0.002:
        time.sleep(seconds - 0.002)
    while time.perf_counter() < end:
        pass


def _charge(nbytes: int) -> None:
    with _lock:
        seconds = sum(price.seconds(nbytes) for price in _costs)
    if seconds > 0:
        _wait(seconds)


def _raise_due_faults() -> None:
    with _lock:
        for fault in list(_faults):
            fault.raise_if_due()


def _record(transfer: Transfer) -> None:
    with _lock:
        for ledger in _ledgers:
            ledger.events.append(transfer)


# ----------------------------------------------------------------------------------------------------------
# Bytes: a buffer stands for one device allocation
# ----------------------------------------------------------------------------------------------------------


class _Buffer:
    """The bytes of one device storage. Counted as device memory as long as any tensor or view uses it."""

    def __init__(self, host: torch.UntypedStorage) -> None:
        self.host = host
        self.nbytes = host.nbytes()
        _memory.add(self.nbytes)
        weakref.finalize(self, _memory.remove, self.nbytes).atexit = False

    @classmethod
    def poisoned(cls, nbytes: int) -> _Buffer:
        return cls(torch.full((nbytes,), POISON, dtype=torch.uint8, device="cpu").untyped_storage())

    def device_storage(self) -> torch.UntypedStorage:
        """A storage on the device over these bytes; it keeps the buffer alive until its last tensor dies."""
        storage = _construct_storage(self.host.data_ptr(), _device(), self.nbytes)
        storage._emulated_buffer = self
        # torch would allocate the copy with a C++ allocator that a Python-only device does not have.
        storage.__deepcopy__ = self._deepcopy
        return storage

    def _deepcopy(self, memo: dict[int, Any]) -> torch.UntypedStorage:
        return _Buffer(self.host.clone()).device_storage()


def _construct_storage(data_ptr: int, device: torch.device, nbytes: int) -> torch.UntypedStorage:
    return torch._C._construct_storage_from_data_pointer(data_ptr, device, nbytes)


def _device() -> torch.device:
    return torch.device(NAME, 0)


def _cpu_kernel(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the C++ kernel that CPU tensors use. Kernels that only handle metadata fit any device."""
    return op.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)


def _point_at(
    tensor: torch.Tensor,
    storage: torch.UntypedStorage,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int = 0,
) -> torch.Tensor:
    op = torch.ops.aten.set_.source_Storage_storage_offset
    _cpu_kernel(op, tensor, storage, offset, list(size), list(stride))
    return tensor


def _on_device(
    buffer: _Buffer, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int], offset: int = 0
) -> torch.Tensor:
    tensor = torch._C._acc.create_empty_tensor((0,), dtype)
    return _point_at(tensor, buffer.device_storage(), size, stride, offset)


def _buffer(tensor: torch.Tensor) -> _Buffer:
    buffer: _Buffer = tensor.untyped_storage()._emulated_buffer
    return buffer


def _host_alias(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over a device tensor's own bytes. Only for use within this module: none may reach a test.

    Its storage cannot be resized, so no CPU kernel can move the bytes away under the device tensor.
    """
    buffer = _buffer(tensor)
    storage = _construct_storage(buffer.host.data_ptr(), torch.device("cpu"), buffer.nbytes)
    storage._emulated_buffer = buffer
    alias = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return _point_at(alias, storage, tensor.size(), tensor.stride(), tensor.storage_offset())


def _is_emulated(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == NAME


def _span(tensor: torch.Tensor) -> int:
    """Elements from the first to the last one that the tensor reaches, gaps included."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def to_device(tensor: torch.Tensor, *, keep_strides: bool = True) -> torch.Tensor:
    """A device tensor with the values of a CPU tensor; neither counted nor charged, for building test data.

    `keep_strides` keeps a transposed or gapped layout (with the bytes in the gaps); else it is contiguous.
    """
    install()
    with torch.no_grad(), _no_modes():
        source = tensor.detach() if keep_strides else tensor.detach().contiguous()
        bytes_between = source.as_strided((_span(source),), (1,), source.storage_offset()).clone()
        return _on_device(_Buffer(bytes_between.untyped_storage()), source.dtype, source.size(), source.stride())


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A fresh CPU copy of a device tensor; neither counted nor charged, for looking at test data."""
    with torch.no_grad(), _no_modes():
        alias = _host_alias(tensor) if _is_emulated(tensor) else tensor.detach()
        return alias.clone()


@contextmanager
def _no_modes() -> Iterator[None]:
    """Hide this module's own bookkeeping from a `TorchDispatchMode` that a test has open."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        yield


# ----------------------------------------------------------------------------------------------------------
# Copies: the only place where bytes cross
# ----------------------------------------------------------------------------------------------------------


def _layout(tensor: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """Size and stride of the axes that matter: an axis of size 1 has no layout."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tuple((size, stride) for size, stride in pairs if size != 1)


def _is_one_block(destination: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether both sides are one dense run of memory in the same order, which a single memcpy moves."""
    expected = 1
    for size, stride in sorted(_layout(source), key=lambda axis: axis[1]):
        if stride != expected:
            return False
        expected *= size
    return _layout(destination) == _layout(source)


@dataclass(frozen=True)
class _Crossing:
    nbytes: int
    temporary_bytes: int


def _crossing(destination: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> _Crossing:
    """What a copy over the boundary moves, and what it allocates on the device meanwhile.

    The rules are those of `copy_kernel_cuda` (aten/src/ATen/native/cuda/Copy.cu). Both have one shape.
    """
    same_dtype = destination.dtype == source.dtype
    if same_dtype and _is_one_block(destination, source):
        return _Crossing(source.numel() * source.element_size(), 0)
    to_host = _is_emulated(source)
    source_converts = to_host == non_blocking
    item_bytes = destination.element_size() if source_converts else source.element_size()
    nbytes = source.numel() * item_bytes
    if to_host:
        cast = destination.dtype if source_converts else source.dtype
        return _Crossing(nbytes, _outgoing_temporary_bytes(source, cast))
    is_direct = destination.is_contiguous() and (same_dtype or source_converts)
    return _Crossing(nbytes, 0 if is_direct else nbytes)


def _outgoing_temporary_bytes(source: torch.Tensor, dtype: torch.dtype) -> int:
    """Device bytes of `source.to(dtype).contiguous()`, which leaves in place of the source."""
    nbytes = source.numel() * dtype.itemsize
    cast_bytes = 0
    outgoing = _layout_only(source)
    if dtype != source.dtype:
        cast_bytes = nbytes
        outgoing = outgoing.to(dtype)
    return cast_bytes + (0 if outgoing.is_contiguous() else nbytes)


def _layout_only(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its bytes, to ask torch which strides an operation gives."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _to_copy(
    self: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
    **_: Any,
) -> torch.Tensor:
    """As torch's own, but `.to("cpu", non_blocking=True)` lands in pageable memory here, in pinned on CUDA.

    A Python-only device has no allocator for pinned memory, and torch's own `_to_copy` insists on one.
    """
    layout = torch.ops.aten._to_copy.default(_layout_only(self), dtype=dtype, memory_format=memory_format)
    destination = torch.empty_strided(
        layout.size(), layout.stride(), dtype=layout.dtype, device=self.device if device is None else device
    )
    return _copy(destination, self, non_blocking, "_to_copy")


def _copy_(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return _copy(self, src, non_blocking, "copy_")


def _direction(destination: torch.Tensor, source: torch.Tensor) -> Direction:
    if not _is_emulated(source):
        return "h2d"
    return "d2d" if _is_emulated(destination) else "d2h"


def _copy(destination: torch.Tensor, source: torch.Tensor, non_blocking: bool, op: str) -> torch.Tensor:
    source = source.expand(destination.shape)
    if destination.numel() == 0:  # nothing crosses, as on a real device
        return destination
    direction = _direction(destination, source)
    if direction == "d2d":
        crossing = _Crossing(source.numel() * source.element_size(), 0)
    else:
        crossing = _crossing(destination, source, non_blocking)
    if direction == "d2h":
        _raise_due_faults()
        _charge(crossing.nbytes)
    with _memory.borrowed(crossing.temporary_bytes):
        target = _host_alias(destination) if _is_emulated(destination) else destination
        target.copy_(_host_alias(source) if _is_emulated(source) else source)
    _record(_transfer(direction, "copy", op, crossing, source, destination.dtype, non_blocking))
    return destination


def _transfer(
    direction: Direction,
    kind: Kind,
    op: str,
    crossing: _Crossing,
    source: torch.Tensor,
    destination_dtype: torch.dtype | None,
    non_blocking: bool = False,
) -> Transfer:
    return Transfer(
        direction=direction,
        kind=kind,
        op=op,
        nbytes=crossing.nbytes,
        source_dtype=source.dtype,
        destination_dtype=destination_dtype,
        shape=tuple(source.shape),
        source_stride=tuple(source.stride()),
        temporary_bytes=crossing.temporary_bytes,
        non_blocking=bool(non_blocking),
        thread=threading.current_thread().name,
    )


def _local_scalar_dense(self: torch.Tensor) -> Any:
    nbytes = self.element_size()
    _charge(nbytes)
    value = _host_alias(self).item()
    _record(_transfer("d2h", "item", "_local_scalar_dense", _Crossing(nbytes, 0), self, None))
    return value


# ----------------------------------------------------------------------------------------------------------
# Allocation and views
# ----------------------------------------------------------------------------------------------------------


def _empty_strided(size: Sequence[int], stride: Sequence[int], *, dtype: Any = None, **_: Any) -> torch.Tensor:
    dtype = dtype or torch.get_default_dtype()
    shape = torch.empty_strided(tuple(size), tuple(stride), dtype=dtype, device="meta")
    return _on_device(_Buffer.poisoned(_span(shape) * dtype.itemsize), dtype, size, stride)


def _empty(size: Sequence[int], *, dtype: Any = None, memory_format: Any = None, **_: Any) -> torch.Tensor:
    like = torch.empty(tuple(size), device="meta", memory_format=memory_format or torch.contiguous_format)
    return _empty_strided(size, like.stride(), dtype=dtype)


def _resize_(self: torch.Tensor, size: Sequence[int], *, memory_format: Any = None) -> torch.Tensor:
    meta = torch.empty(tuple(size), device="meta", memory_format=memory_format or torch.contiguous_format)
    storage = self.untyped_storage()
    needed_bytes = (self.storage_offset() + meta.numel()) * self.element_size()
    if needed_bytes > storage.nbytes():
        grown = _Buffer.poisoned(needed_bytes)
        _as_bytes(grown.host)[: storage.nbytes()] = _as_bytes(_buffer(self).host)
        storage = grown.device_storage()
    return _point_at(self, storage, size, meta.stride(), self.storage_offset())


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


def _record_stream(self: torch.Tensor, stream: Any) -> None:
    """Nothing is pending on a stream when an operation returns, so no memory has to outlive its tensor."""


def _metadata_kernel(op: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        return _cpu_kernel(op, *args, **kwargs)

    return kernel


# ----------------------------------------------------------------------------------------------------------
# Everything else: run the CPU kernel over the same bytes, in place
# ----------------------------------------------------------------------------------------------------------


def _map_tensors(value: Any, fn: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_map_tensors(item, fn) for item in value)
    return value


class _CpuCall:
    """One operator on device tensors, carried out by the CPU's kernel over the same bytes."""

    def __init__(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.op = op
        self.args = args
        self.kwargs = kwargs
        self.inputs: list[tuple[torch.Tensor, torch.Tensor]] = []  # (device tensor, its alias)
        self.grown: list[tuple[torch.Tensor, torch.Tensor]] = []  # empty `out=` tensors and what fills them

    def run(self) -> Any:
        args = tuple(self._lower(value) for value in self.args)
        kwargs = {name: self._lower(value, name) for name, value in self.kwargs.items()}
        result = self.op(*args, **kwargs)
        for tensor, filled in self.grown:
            _point_at(tensor, _Buffer(filled.untyped_storage()).device_storage(), filled.size(), filled.stride())
        if not isinstance(result, torch.Tensor) and isinstance(result, (bool, int, float)):
            self._record_item()
        return self._raise_to_device(result)

    def _lower(self, value: Any, name: str = "") -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu") if value.type == NAME else value
        return _map_tensors(value, lambda tensor: self._alias(tensor, name))

    def _alias(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        if not _is_emulated(tensor):
            if tensor.dim() == 0:  # a number in a tensor, which torch accepts beside any device
                return tensor
            tensor = self._moved(tensor)
        if name.startswith("out") and tensor.numel() == 0:
            filled = torch.empty(0, dtype=tensor.dtype, device="cpu")
            self.grown.append((tensor, filled))
            return filled
        alias = _host_alias(tensor)
        self.inputs.append((tensor, alias))
        return alias

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Indexing moves a host index to the device, as CUDA does: a counted transfer. Nothing else may."""
        if self.op.name() == "aten::index.Tensor_out":
            return to_device(tensor)  # torch moved it once already, counted, to find the result's shape
        if self.op.name().startswith(("aten::index.", "aten::index_put", "aten::_index_put_impl_")):
            return tensor.to(_device())
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {self.op.name()} got tensors on {NAME} and "
            f"a {tensor.device.type} tensor of shape {tuple(tensor.shape)}; move one of them first"
        )

    def _record_item(self) -> None:
        if self.inputs:
            name = self.op.name().removeprefix("aten::")
            _charge(1)  # one boolean comes back
            _record(_transfer("d2h", "item", name, _Crossing(1, 0), self.inputs[0][0], None))

    def _raise_to_device(self, result: Any) -> Any:
        return _map_tensors(result, self._adopt)

    def _adopt(self, result: torch.Tensor) -> torch.Tensor:
        for tensor, alias in (*self.inputs, *self.grown):
            if result is alias:
                return tensor
        for tensor, alias in self.inputs:
            if alias.untyped_storage().data_ptr() == result.untyped_storage().data_ptr() != 0:
                return self._over(tensor.untyped_storage(), result)
        return self._over(_Buffer(result.untyped_storage()).device_storage(), result)

    def _over(self, storage: torch.UntypedStorage, result: torch.Tensor) -> torch.Tensor:
        tensor = torch._C._acc.create_empty_tensor((0,), result.dtype)
        return _point_at(tensor, storage, result.size(), result.stride(), result.storage_offset())


def _fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    return _CpuCall(op, args, kwargs).run()


# ----------------------------------------------------------------------------------------------------------
# Registration
# ----------------------------------------------------------------------------------------------------------


class _Backend(types.ModuleType):
    """What `torch.get_device_module("emu")` returns."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        if torch.device(NAME, device if isinstance(device, int) else 0).index != 0:
            raise RuntimeError(f"invalid device {device}: there is one emulated accelerator, {NAME}:0")

    def synchronize(self, device: Any = None) -> None:
        """Every operation here is done when it returns, so this only counts."""
        with _lock:
            for ledger in _ledgers:
                ledger.synchronizes += 1

    def memory_allocated(self, device: Any = None) -> int:
        return memory_allocated()

    def max_memory_allocated(self, device: Any = None) -> int:
        return max_memory_allocated()

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        reset_peak()

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Random numbers on this device come from the CPU's generator."""


def _register_kernels() -> None:
    aten = torch.ops.aten
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in {
        "copy_": _copy_,
        "_to_copy": _to_copy,
        "_local_scalar_dense": _local_scalar_dense,
        "empty.memory_format": _empty,
        "empty_strided": _empty_strided,
        "resize_": _resize_,
        "record_stream": _record_stream,
        "as_strided": _metadata_kernel(aten.as_strided.default),
        "view": _metadata_kernel(aten.view.default),
        "_reshape_alias": _metadata_kernel(aten._reshape_alias.default),
        "unfold": _metadata_kernel(aten.unfold.default),
        "set_.source_Storage_storage_offset": _metadata_kernel(aten.set_.source_Storage_storage_offset),
        "set_.source_Storage": _metadata_kernel(aten.set_.source_Storage),
        "set_.source_Tensor": _metadata_kernel(aten.set_.source_Tensor),
    }.items():
        library.impl(name, kernel, "PrivateUse1")
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(_fallback, "PrivateUse1")
    _libraries.extend((library, fallback))


_libraries: list[torch.library.Library] = []  # a library that dies takes its kernels along


def _missing() -> list[str]:
    """The private helpers of torch that this module needs and this torch lacks."""
    needed = {
        "torch.utils.backend_registration._setup_privateuseone_for_python_backend": (
            torch.utils.backend_registration,
            "_setup_privateuseone_for_python_backend",
        ),
        "torch._C._acc.create_empty_tensor": (getattr(torch._C, "_acc", None), "create_empty_tensor"),
        "torch._C._construct_storage_from_data_pointer": (torch._C, "_construct_storage_from_data_pointer"),
        "torch.library.Library.fallback": (torch.library.Library, "fallback"),
    }
    return [name for name, (owner, attribute) in needed.items() if not hasattr(owner, attribute)]


def _self_check() -> None:
    """What rests on torch's inner workings: kernels are called, and a storage keeps its bytes."""
    tensor = to_device(torch.arange(6, dtype=torch.float32).reshape(2, 3))
    view = tensor.T[1:]
    del tensor
    gc.collect()
    values = (view + 1).cpu().tolist()
    if values != [[2.0, 5.0], [3.0, 6.0]]:
        raise RuntimeError(f"a view of a tensor that is gone reads {values}")


def install() -> None:
    """Register the device, once a process; calling it again changes nothing.

    Raises EmulationUnavailable where this torch lacks a private helper or holds another foreign device.
    """
    with _lock:
        if _libraries:
            return
        missing = _missing()
        if missing:
            raise EmulationUnavailable(f"torch {torch.__version__} has no {', '.join(missing)}")
        taken = torch._C._get_privateuse1_backend_name()
        if taken != "privateuseone":
            raise EmulationUnavailable(
                f"torch's one slot for a foreign device already holds {taken!r}; if that is {NAME!r}, "
                "this module was imported under two names (tests.emulated and emulated): import it under one"
            )
        torch.utils.backend_registration._setup_privateuseone_for_python_backend(NAME, _Backend(f"torch.{NAME}"))
        _register_kernels()
        try:
            _self_check()
        except Exception as error:
            _libraries.clear()
            raise EmulationUnavailable(f"torch {torch.__version__} hosts no emulated device: {error}") from error


def install_or_skip() -> None:
    """`install()` for the top of a test module: skips it, with the reason, where the device cannot exist."""
    try:
        install()
    except EmulationUnavailable as error:
        import pytest

        pytest.skip(str(error), allow_module_level=True)
