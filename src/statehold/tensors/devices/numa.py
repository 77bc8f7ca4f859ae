"""Staging memory beside the device: pages on the memory node that the device's bus belongs to.

A copy that crosses from one socket's memory to a device of the other one is slower, and takes from
the link between the sockets.

Source: Linux, Documentation/ABI/testing/sysfs-bus-pci (numa_node); mbind(2).
Invariants: nothing here fails a save. Where the node is not known, or the kernel refuses, the pages
stay where they are.
"""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path
from typing import Any

import torch
from torch import cuda

from statehold.process.warn import logger

SYSFS = Path("/sys")
_MBIND = {"x86_64": 237, "aarch64": 235}
_PREFERRED, _MOVE = 1, 1 << 1
_NODES_MAX = 1024


def node_of(device: torch.device) -> int | None:
    """The memory node of a device; None where there is but one node, or it is not known."""
    nodes = list((SYSFS / "devices/system/node").glob("node[0-9]*"))
    if len(nodes) < 2:
        return None
    properties: Any = cuda.get_device_properties(device)
    try:  # torch shows the place on the bus from 2.7 on
        domain, bus = properties.pci_domain_id, properties.pci_bus_id
        name = f"{domain:04x}:{bus:02x}:{properties.pci_device_id:02x}.0"
        node = int((SYSFS / "bus/pci/devices" / name / "numa_node").read_text())
    except (AttributeError, OSError, ValueError):
        return None
    return node if 0 <= node < _NODES_MAX else None  # the kernel says -1 for unknown


def bring(address: int, nbytes: int, node: int) -> bool:
    """Have these pages on `node`, those that are present and those to come. `address` is that of a
    page. Whether the kernel does it."""
    number = _MBIND.get(platform.machine())
    if number is None:
        return False
    mask = (ctypes.c_ulong * (_NODES_MAX // (8 * ctypes.sizeof(ctypes.c_ulong))))()
    ctypes.c_uint8.from_buffer(mask, node // 8).value = 1 << node % 8
    libc: Any = ctypes.CDLL(None, use_errno=True)
    refused = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_int(_PREFERRED),
        mask,
        ctypes.c_ulong(_NODES_MAX),
        ctypes.c_uint(_MOVE),
    )
    if refused:
        why = os.strerror(ctypes.get_errno())
        logger.debug("staging memory stays where it is, not on memory node %d: %s", node, why)
    return not refused
