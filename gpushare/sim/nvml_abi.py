"""The ABI of a C library: return codes, handles, output arguments, and the table of entry points.

Written against nvml.h; needs no pynvml, because structs and arrays are always the caller's.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable, Mapping
from enum import Enum, IntEnum
from typing import Any, Final, NamedTuple

from gpushare.base.values import dataclass
from gpushare.gpu_models import GpuModel
from gpushare.mig.profile import Profile
from gpushare.sim.state import SimulatedGpu, SimulatedGpuInstance, SimulatedMigInstance

# "No GPU or compute instance" in nvmlProcessInfo_t.
NO_INSTANCE: Final = 0xFFFFFFFF
# What one nvidia-cuda-mps-server holds on an H200, driver 580.
MPS_SERVER_BYTES: Final = 69206016


class Code(IntEnum):
    """nvmlReturn_t."""

    SUCCESS = 0
    UNINITIALIZED = 1
    INVALID_ARGUMENT = 2
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    NOT_FOUND = 6
    INSUFFICIENT_SIZE = 7
    DRIVER_NOT_LOADED = 9
    TIMEOUT = 10
    LIBRARY_NOT_FOUND = 12
    FUNCTION_NOT_FOUND = 13
    GPU_IS_LOST = 15
    RESET_REQUIRED = 16
    LIB_RM_VERSION_MISMATCH = 18
    IN_USE = 19
    INSUFFICIENT_RESOURCES = 23
    ARGUMENT_VERSION_MISMATCH = 25
    UNKNOWN = 999


# The library's own texts (nvmlErrorString), where they are not the name in words.
_TEXTS: Final = {
    Code.NO_PERMISSION: "Insufficient Permissions",
    Code.LIBRARY_NOT_FOUND: "NVML Shared Library Not Found",
    Code.GPU_IS_LOST: "GPU is lost",
    Code.RESET_REQUIRED: "GPU requires reset",
    Code.LIB_RM_VERSION_MISMATCH: "Driver/library version mismatch",
    Code.IN_USE: "In use by another client",
    Code.ARGUMENT_VERSION_MISMATCH: "Argument version mismatch",
    Code.UNKNOWN: "Unknown Error",
}
ERROR_TEXTS: Final[Mapping[int, str]] = {code: _TEXTS.get(code, code.name.replace("_", " ").title()) for code in Code}


class Refused(Exception):
    """An entry point returns this code instead of success."""

    def __init__(self, code: Code) -> None:
        super().__init__(code.name)
        self.code: Final = code


class HandleKind(IntEnum):
    """The object behind a handle."""

    GPU = 1
    MIG_DEVICE = 2
    GPU_INSTANCE = 3
    COMPUTE_INSTANCE = 4
    GPM_SAMPLE = 5


@dataclass(frozen=True)
class Handle:
    """An opaque pointer. It is made of the ids of what it names, not of an address, so it survives changes of the state."""

    kind: HandleKind
    index: int
    gpu_instance: int = 0
    compute_instance: int = 0

    def pack(self) -> int:
        """Return the value of the pointer: from the top kind, GPU index, and both instance ids, 8 bits each."""
        return self.kind << 24 | self.index << 16 | self.gpu_instance << 8 | self.compute_instance

    @staticmethod
    @functools.cache
    def unpack(value: int) -> Handle:
        """Return the handle that `pack` made a pointer of; Refused: INVALID_ARGUMENT, it made no such pointer."""
        try:
            kind = HandleKind(value >> 24)
        except ValueError:
            raise Refused(Code.INVALID_ARGUMENT) from None
        return Handle(kind, value >> 16 & 0xFF, value >> 8 & 0xFF, value & 0xFF)


class Target(NamedTuple):
    """What an entry point was called on: a GPU, or an instance of it."""

    handle: Handle
    gpu: SimulatedGpu
    model: GpuModel
    # The MIG device, or compute instance; None for a whole GPU, or a GPU instance.
    instance: SimulatedMigInstance | None = None
    # The GPU instance, or that of the MIG device or compute instance; None for a whole GPU.
    gpu_instance: SimulatedGpuInstance | None = None

    @property
    def mig_enabled(self) -> bool:
        """Return whether the GPU is in MIG mode."""
        return self.gpu.mig_mode == 1


def profile_of(model: GpuModel, instance: SimulatedGpuInstance | None) -> Profile:
    """Return the profile of an instance; Refused: INVALID_ARGUMENT for None, and for a profile that the model lacks."""
    profile = None if instance is None else model.profile(instance.profile)
    if profile is None:
        raise Refused(Code.INVALID_ARGUMENT)
    return profile


Kinds = frozenset[HandleKind]


class On:
    """What an entry point takes as its first argument."""

    NOTHING: Final[Kinds] = frozenset()
    GPU: Final[Kinds] = frozenset({HandleKind.GPU})
    DEVICE: Final[Kinds] = frozenset({HandleKind.GPU, HandleKind.MIG_DEVICE})
    GPU_INSTANCE: Final[Kinds] = frozenset({HandleKind.GPU_INSTANCE})
    COMPUTE_INSTANCE: Final[Kinds] = frozenset({HandleKind.COMPUTE_INSTANCE})


class EntryPoint(NamedTuple):
    """One entry point of the library."""

    name: str
    function: Callable[..., None]
    on: Kinds
    # False for the few that work before nvmlInit.
    needs_init: bool


ENTRY_POINTS: Final[dict[str, EntryPoint]] = {}


def entry_point(
    *names: str, on: Kinds = On.NOTHING, needs_init: bool = True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that registers a function under the names of entry points.

    The function is called with the library, the `Target` unless ``on`` is NOTHING, and the C arguments; it
    returns for success and raises `Refused` for any other code.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        for name in names:
            ENTRY_POINTS[name] = EntryPoint(name, function, on, needs_init)
        return function

    return register


class Form(Enum):
    """How a getter hands its value over: in which output arguments, which are the last ones."""

    NUMBER = "number"
    # Two output arguments.
    NUMBERS = "two numbers"
    # A buffer and its length.
    TEXT = "text"
    FIELDS = "fields of a struct"
    VERSIONED_FIELDS = "fields of a struct that says its version first"


def register_getter(names: str, on: Kinds, form: Form, getter: Callable[..., Any]) -> None:
    """Register a function that returns a value under the names of entry points, with blanks between them.

    The function gets the library, the `Target` unless ``on`` is NOTHING, and the input arguments as numbers. None is
    refused with NOT_SUPPORTED.
    """
    first_input = 1 if on else 0
    output_count = 2 if form in {Form.TEXT, Form.NUMBERS} else 1

    def call_getter(library: Any, *arguments: Any) -> None:
        """Call the getter with the inputs, and write what it returns to the outputs."""
        inputs, outputs = arguments[first_input:-output_count], arguments[-output_count:]
        target = target_of(outputs[0])
        # The low 24 bits of a version are the size of the struct (NVML_STRUCT_VERSION).
        if form is Form.VERSIONED_FIELDS and target.version & 0xFFFFFF != ctypes.sizeof(target):
            raise Refused(Code.ARGUMENT_VERSION_MISMATCH)
        value = getter(library, *arguments[:first_input], *map(number, inputs))
        if value is None:
            raise Refused(Code.NOT_SUPPORTED)
        if form is Form.TEXT:
            buffer, length = outputs
            put_text(buffer, target_of(length), value)
        elif form is Form.NUMBERS:
            for output, value_of_output in zip(outputs, value, strict=True):
                put(output, value_of_output)
        elif form is Form.NUMBER:
            put(outputs[0], value)
        else:
            put_fields(target, value)

    entry_point(*names.split(), on=on)(call_getter)


def unversioned(name: str) -> str:
    """Return an entry point's name without its version: ``_v2``, ``_v3``, ``V``."""
    return re.sub(r"(_v[0-9]+|V[0-9]*)$", "", name)


def target_of(argument: Any) -> Any:
    """Return what an output argument points to: byref(), a pointer, or an array or struct passed as it is."""
    if hasattr(argument, "_obj"):
        return argument._obj
    return argument.contents if hasattr(argument, "contents") else argument


def number(argument: Any) -> int:
    """Return an input argument: a c_uint and the like, or a Python int."""
    return int(getattr(argument, "value", argument))


def put(argument: Any, value: int) -> None:
    """Write a number to an output argument; Refused: INVALID_ARGUMENT for NULL."""
    if argument is None:
        raise Refused(Code.INVALID_ARGUMENT)
    target_of(argument).value = value


def put_count(count: Any, array: Any, needed: int) -> None:
    """Write how many entries there are to ``count``, which had the size of the caller's array; refuse one that is too small."""
    # NULL asks for the count.
    capacity = number(target_of(count)) if count is not None and array is not None else 0
    put(count, needed)
    if capacity < needed:
        raise Refused(Code.INSUFFICIENT_SIZE)


def put_text(buffer: Any, length: Any, text: str) -> None:
    """Write a C string to a buffer; Refused: INSUFFICIENT_SIZE."""
    encoded = text.encode()
    if len(encoded) + 1 > number(length):
        raise Refused(Code.INSUFFICIENT_SIZE)
    target_of(buffer).value = encoded


def put_handle(argument: Any, handle: Handle) -> None:
    """Write an opaque pointer to an output argument."""
    ctypes.c_void_p.from_buffer(target_of(argument)).value = handle.pack()


def put_fields(struct: Any, values: Mapping[str, Any]) -> None:
    """Fill those fields that this version of the struct has; ``Handle`` becomes a pointer."""
    types = {field[0]: field[1] for field in struct._fields_}
    for name, value in values.items():
        if name in types:
            plain = ctypes.cast(ctypes.c_void_p(value.pack()), types[name]) if isinstance(value, Handle) else value
            setattr(struct, name, plain)


def pointer_value(argument: Any) -> int:
    """Return the value of an opaque pointer; 0 for NULL."""
    return ctypes.cast(argument, ctypes.c_void_p).value or 0
