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
    """An opaque pointer. It holds the place, not an address, so it stays valid across state changes."""

    kind: HandleKind
    index: int
    gpu_instance: int = 0
    compute_instance: int = 0

    def pack(self) -> int:
        """Return the pointer value."""
        return self.kind << 24 | self.index << 16 | self.gpu_instance << 8 | self.compute_instance

    @staticmethod
    @functools.cache
    def unpack(value: int) -> Handle:
        """Return the handle of a pointer value.

        Raises:
            Refused: INVALID_ARGUMENT, it is none of ours.
        """
        if value >> 24 not in HandleKind._value2member_map_:
            raise Refused(Code.INVALID_ARGUMENT)
        return Handle(HandleKind(value >> 24), value >> 16 & 0xFF, value >> 8 & 0xFF, value & 0xFF)


class Target(NamedTuple):
    """What an entry point was called on: a GPU, or an instance of it."""

    handle: Handle
    gpu: SimulatedGpu
    model: GpuModel
    # The MIG device, or compute instance; None for a whole GPU, or a GPU instance.
    instance: SimulatedMigInstance | None = None
    # Of a GPU instance: itself; it may hold no compute instance.
    gpu_instance: SimulatedGpuInstance | None = None

    @property
    def mig_enabled(self) -> bool:
        """Return whether the GPU is in MIG mode."""
        return self.gpu.mig_mode == 1


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
    """Register a function under the names of entry points.

    It is called with the library, the `Target` unless ``on`` is NOTHING, and the C arguments; it
    returns for success and raises `Refused` for any other code.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        for name in names:
            ENTRY_POINTS[name] = EntryPoint(name, function, on, needs_init)
        return function

    return register


class Form(Enum):
    """How a getter hands its value over."""

    NUMBER = "number"
    # Two output arguments.
    NUMBERS = "two numbers"
    # A buffer and its length.
    TEXT = "text"
    FIELDS = "fields of a struct"
    VERSIONED_FIELDS = "fields of a struct that says its version first"


def register_getter(names: str, on: Kinds, form: Form, getter: Callable[..., Any]) -> None:
    """Register a function that returns a value under the names of entry points, with blanks between them.

    An entry point takes the handle unless ``on`` is NOTHING, its inputs, and its outputs: a buffer and its length (TEXT), two
    pointers (NUMBERS), else one pointer. The function gets the library, the `Target` of the handle, and the inputs as numbers.
    None is refused with NOT_SUPPORTED.
    """
    first = 1 if on else 0

    def answer(library: Any, *arguments: Any) -> None:
        """Call the getter with the inputs, and write what it returns to the outputs."""
        last = len(arguments) - (2 if form in {Form.TEXT, Form.NUMBERS} else 1)
        output = arguments[last]
        if form is Form.VERSIONED_FIELDS:
            struct = target_of(output)
            # The low 24 bits are its size (NVML_STRUCT_VERSION).
            if struct.version & 0xFFFFFF != ctypes.sizeof(struct):
                raise Refused(Code.ARGUMENT_VERSION_MISMATCH)
        answered = getter(library, *arguments[:first], *map(number, arguments[first:last]))
        if answered is None:
            raise Refused(Code.NOT_SUPPORTED)
        if form is Form.TEXT:
            put_text(output, target_of(arguments[-1]), answered)
        elif form is Form.NUMBERS:
            put(output, answered[0])
            put(arguments[-1], answered[1])
        elif form is Form.NUMBER:
            put(output, answered)
        else:
            put_fields(target_of(output), answered)

    entry_point(*names.split(), on=on)(answer)


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
    """Write a number to an output argument.

    Raises:
        Refused: INVALID_ARGUMENT for NULL.
    """
    if argument is None:
        raise Refused(Code.INVALID_ARGUMENT)
    target_of(argument).value = value


def put_text(buffer: Any, length: Any, text: str) -> None:
    """Write a C string to a buffer.

    Raises:
        Refused: INSUFFICIENT_SIZE.
    """
    encoded = text.encode()
    if len(encoded) + 1 > number(length):
        raise Refused(Code.INSUFFICIENT_SIZE)
    target_of(buffer).value = encoded


def put_handle(argument: Any, handle: Handle) -> None:
    """Write an opaque pointer to an output argument."""
    ctypes.c_void_p.from_buffer(target_of(argument)).value = handle.pack()


# The types of a struct's fields by name, for each struct that was filled.
_TYPES: Final[dict[Any, dict[str, Any]]] = {}


def put_fields(struct: Any, values: Mapping[str, Any]) -> None:
    """Fill those fields that this version of the struct has; ``Handle`` becomes a pointer."""
    types = _TYPES.get(type(struct))
    if types is None:
        types = _TYPES[type(struct)] = {field[0]: field[1] for field in struct._fields_}
    for name, value in values.items():
        if name in types:
            plain = ctypes.cast(ctypes.c_void_p(value.pack()), types[name]) if isinstance(value, Handle) else value
            setattr(struct, name, plain)


def pointer_value(argument: Any) -> int:
    """Return the value of an opaque pointer; 0 for NULL."""
    if isinstance(argument, ctypes._Pointer):
        # As cast() does, in a third of the time.
        return ctypes.c_void_p.from_buffer(argument).value or 0
    return ctypes.cast(argument, ctypes.c_void_p).value or 0
