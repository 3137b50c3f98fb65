"""The tiles of AMX for a process on a CPU that has none: what the CPU refuses to execute is executed here.

A CPU without AMX raises SIGILL at such an instruction. The handler, compiled, reads the instruction where it stands,
does what Intel's manual (Software Developer's Manual, volume 2) says, and goes on behind it. Only one thread may use
the tiles.

As a plugin of pytest (`-p amx_emulator`) it makes its process one that has AMX, as far as treadle_kernels can see.
"""

from __future__ import annotations

import ctypes
import functools
import signal

import llvmlite.binding as llvm
import numpy as np
import pytest
from numba import carray, cfunc, njit, types
from treadle_kernels.memory import pointer

TILES, TILE_BYTES, ROWS, ROW_BYTES, WORDS = 8, 1024, 16, 64, 16
SA_SIGINFO, SA_NODEFER = 4, 0x40000000
# In `ucontext_t` of x86-64 Linux: where the registers stand, and which of them is which by the CPU's numbers.
REGISTERS_AT, RIP = 40, 16
BY_NUMBER = (13, 14, 12, 11, 15, 10, 9, 8, 0, 1, 2, 3, 4, 5, 6, 7)
# Prefixes as VEX has them, and the second byte of the operations.
NONE, P66, F3, F2 = range(4)
CONFIGURE, MOVE, MULTIPLY = 0x49, 0x4B, 0x5C
SMALLEST = np.float32(2.0**-126)

# What the thread has: the configuration as it was loaded (all 0 without one), the tiles, how many instructions there
# were, and room for two tiles widened. Compiled code has its address.
STATE = np.zeros(
    1, [("config", "u1", 64), ("tiles", "u1", TILES * TILE_BYTES), ("count", "i8"), ("wide", "f4", (4, 16, 16))]
)
CONFIG, TILE, COUNT, WIDE = (STATE.ctypes.data + STATE.dtype.fields[name][1] for name in STATE.dtype.names)


@njit
def _array(address, shape, dtype):
    return carray(pointer(np.int64(address)), shape, dtype)


@njit
def _shape(tile):
    """Return the configured rows of a tile, and the bytes of one."""
    config = _array(CONFIG, (64,), np.uint8)
    return np.int64(config[48 + tile]), np.int64(config[16 + 2 * tile])


@njit
def _copy(source, target, count):
    """Copy bytes, or clear them where the source is at 0."""
    found, made = _array(source, (count,), np.uint8), _array(target, (count,), np.uint8)
    for place in range(count):
        made[place] = found[place] if source != 0 else 0


@njit
def _move(tile, address, stride, store):
    """Load a tile, and zeros where it has nothing, or store it."""
    (rows, width), own = _shape(tile), TILE + tile * TILE_BYTES
    if not store:
        _copy(0, own, TILE_BYTES)
    for row in range(rows):
        line, part = address + row * stride, own + row * ROW_BYTES
        _copy(part if store else line, line if store else part, width)


@njit
def _flushed(value):
    return value * np.float32(0) if abs(value) < SMALLEST else value


@njit
def _widen(tile, first):
    """Write a tile's numbers at even places and those at odd ones as float32, denormals as zeros."""
    words = _array(TILE + tile * TILE_BYTES, (ROWS, WORDS), np.uint32)
    bits, wide = _array(WIDE, (4, ROWS, WORDS), np.uint32), _array(WIDE, (4, ROWS, WORDS), np.float32)
    for row in range(ROWS):
        for column in range(WORDS):
            bits[first, row, column] = words[row, column] << np.uint32(16)
            bits[first + 1, row, column] = words[row, column] & np.uint32(0xFFFF0000)
            for half in range(2):
                wide[first + half, row, column] = _flushed(wide[first + half, row, column])


@njit
def _multiply(into, left, right):
    """TDPBF16PS: of each sum's pairs the even places are added up, and the odd ones, then both, then that to the sum.

    Products are exact; so are their sums before they are rounded, as float64 is wide enough to round twice.
    """
    _widen(left, 0)
    _widen(right, 2)
    wide, totals = (
        _array(WIDE, (4, ROWS, WORDS), np.float32),
        _array(TILE + into * TILE_BYTES, (ROWS, WORDS), np.float32),
    )
    (rows, width), pairs = _shape(into), _shape(left)[1] // 4
    for row in range(rows):
        for column in range(width // 4):
            even = odd = np.float32(0)
            for pair in range(pairs):
                even = _flushed(np.float32(even + np.float64(wide[0, row, pair]) * wide[2, pair, column]))
                odd = _flushed(np.float32(odd + np.float64(wide[1, row, pair]) * wide[3, pair, column]))
            totals[row, column] = _flushed(totals[row, column] + _flushed(even + odd))


@njit
def _operand(code, registers):
    """Return the address that an instruction's operand in memory has, its index register's part, and its length."""
    mod, rm, place = code[4] >> 6, code[4] & 7, 5
    base, extension, index = rm, np.int64(~code[1] >> 5 & 1) << 3, np.int64(0)
    if rm == 4:
        base, number, place = code[5] & 7, (code[5] >> 3 & 7) | (np.int64(~code[1] >> 6 & 1) << 3), 6
        if number != 4:
            index = registers[BY_NUMBER[number]] << np.int64(code[5] >> 6)
    at, offset = code.ctypes.data + place, np.int64(0)
    if mod == 2 or (mod == 0 and base == 5):
        offset, place = np.int64(_array(at, (1,), np.int32)[0]), place + 4
    elif mod == 1:
        offset, place = np.int64(_array(at, (1,), np.int8)[0]), place + 1
    if mod == 0 and base == 5:
        start = registers[RIP] + place if rm == 5 else np.int64(0)
    else:
        start = registers[BY_NUMBER[base | extension]]
    return start + offset, index, place


@njit
def _execute(registers):
    """Do the instruction that the registers stand at; return its length, or 0 if it is none of AMX."""
    code, config = _array(registers[RIP], (16,), np.uint8), _array(CONFIG, (64,), np.uint8)
    prefix, operation, modrm = code[2] & 3, code[3], code[4]
    tile, configured, length = np.int64(modrm >> 3 & 7), config[0] == 1, 5
    if code[0] != 0xC4 or code[1] & 31 != 2 or code[2] & 0x84 != 0:
        return 0
    if modrm >> 6 != 3:
        address, stride, length = _operand(code, registers)
        if operation == CONFIGURE and prefix == NONE:
            _copy(address, CONFIG, 64)
            _copy(0, TILE, TILES * TILE_BYTES)
        elif operation == MOVE and configured and prefix != NONE:
            _move(tile, address, stride, prefix == F3)
        else:
            return 0
    elif operation == MULTIPLY and configured and prefix == F3:
        _multiply(tile, np.int64(modrm & 7), np.int64(~code[2] >> 3 & 15))
    elif operation == CONFIGURE and prefix == NONE:
        _copy(0, CONFIG, 64)
    elif operation == CONFIGURE and configured and prefix == F2:
        _copy(0, TILE + tile * TILE_BYTES, TILE_BYTES)
    else:
        return 0
    return length


def _handle(number, information, context):
    registers = _array(context + REGISTERS_AT, (17,), np.int64)
    length = _execute(registers)
    # What is no instruction of AMX, or comes without a configuration, must end the process: it goes on at 0.
    registers[RIP] = registers[RIP] + length if length > 0 else 0
    _array(COUNT, (1,), np.int64)[0] += 1


class _Action(ctypes.Structure):
    """`struct sigaction` of glibc."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


@functools.cache
def install() -> object:
    """Make this process one with AMX; call it before anything of treadle_kernels is compiled."""
    from treadle_kernels import machine

    features = llvm.get_host_cpu_features() | {"amx-tile": True, "amx-bf16": True}
    found = llvm.targets.FeatureMap(features)
    llvm.get_host_cpu_features = lambda: found
    machine.may_use_tiles = lambda: True
    handler = cfunc(types.void(types.int32, types.int64, types.int64))(_handle)
    action = _Action(handler.address, flags=SA_SIGINFO | SA_NODEFER)
    if ctypes.CDLL(None).sigaction(signal.SIGILL, ctypes.byref(action), None) != 0:
        raise OSError("SIGILL cannot be handled")
    return handler


def pytest_sessionstart() -> None:
    """Install the emulator behind the handlers that pytest has set."""
    install()


@pytest.fixture(scope="session")
def kernels():
    """The backend with one thread, compiled in this process."""
    from treadle_kernels.backend import KernelBackend

    return KernelBackend(num_threads=1)
