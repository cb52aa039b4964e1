"""The system call filter: a seccomp program that denies what a Python script does not need.

It covers what namespaces and limits do not: socket families that a network namespace does not isolate (vsock), memory
that no limit counts (memfd, System V segments), new namespaces, and calls that inspect other processes or have often
been used to attack the kernel.
"""

from __future__ import annotations

import errno
import platform
import struct

_X86_64, _AARCH64 = "x86_64", "aarch64"
_AUDIT_ARCH = {_X86_64: 0xC000003E, _AARCH64: 0xC00000B7}

# System call numbers on x86_64 and aarch64.
REFUSED = {
    "add_key": (248, 217),
    "bpf": (321, 280),
    "delete_module": (176, 106),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "request_key": (249, 218),
    "semget": (64, 190),
    "setns": (308, 268),
    "shmget": (29, 194),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}
CLONE, CLONE3, SOCKET = (56, 220), (435, 435), (41, 198)

_CLONE_NEW = 0x7E020000  # all flags of clone that create a namespace
_AF_UNIX = 1

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_OFFSET, _ARCH_OFFSET, _FIRST_ARGUMENT_OFFSET = 0, 4, 16
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000


def seccomp_filter(machine: str | None = None) -> bytes:
    """Return the filter for a machine, in the kernel's binary format.

    Raises:
        ValueError: If its system call numbers are not known here.
    """
    machine = machine or platform.machine()
    if machine not in _AUDIT_ARCH:
        raise ValueError(f"there is no system call filter for {machine!r}, only for {sorted(_AUDIT_ARCH)}")
    column = 0 if machine == _X86_64 else 1
    refuse = _instruction(_RETURN, _ERRNO | errno.EPERM)
    allow = _instruction(_RETURN, _ALLOW)
    program = [
        _instruction(_LOAD, _ARCH_OFFSET),
        _instruction(_EQUAL, _AUDIT_ARCH[machine], 1, 0),  # 32-bit calls have other numbers
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NUMBER_OFFSET),
    ]
    if machine == _X86_64:  # so do those of the x32 interface
        program += [_instruction(_AT_LEAST, 0x40000000, 0, 1), _instruction(_RETURN, _KILL)]
    for numbers in REFUSED.values():
        program += [_instruction(_EQUAL, numbers[column], 0, 1), refuse]
    # A filter cannot read the flags of clone3; C libraries fall back on clone if it is missing.
    program += [_instruction(_EQUAL, CLONE3[column], 0, 1), _instruction(_RETURN, _ERRNO | errno.ENOSYS)]
    program += [
        _instruction(_EQUAL, CLONE[column], 0, 4),
        _instruction(_LOAD, _FIRST_ARGUMENT_OFFSET),
        _instruction(_ANY_BIT, _CLONE_NEW, 0, 1),
        refuse,
        allow,
        _instruction(_EQUAL, SOCKET[column], 0, 3),
        _instruction(_LOAD, _FIRST_ARGUMENT_OFFSET),
        _instruction(_EQUAL, _AF_UNIX, 1, 0),
        refuse,
        allow,
    ]
    return b"".join(program)


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
