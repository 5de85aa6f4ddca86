"""The files that the disk cache keeps kernels in, taken apart and forged."""

import struct

_HEADER = struct.Struct("<8s32s32siiQQQ")
SIZES = ("name_bytes", "log_bytes", "image_bytes")


def checksum(data: bytes) -> bytes:
    """FNV-1a, 128 bits, of the length and the bytes; as hexadecimal digits."""
    state = 0x6C62272E07BB014262B821756295C58D
    for byte in struct.pack("<Q", len(data)) + data:
        state = (state ^ byte) * ((1 << 88) + 0x13B) % (1 << 128)
    return b"%032x" % state


def forge(file: bytes, **sizes: int) -> bytes:
    """`file` with other sizes in its header, and the checksum that goes with them."""
    fields = list(_HEADER.unpack_from(file))
    for name, value in sizes.items():
        fields[SIZES.index(name) - len(SIZES)] = value
    forged = _HEADER.pack(*fields) + file[_HEADER.size :]
    fields[2] = checksum(forged[8 + 32 + 32 :])
    return _HEADER.pack(*fields) + file[_HEADER.size :]


def sizes(file: bytes) -> dict[str, int]:
    """The sizes in the header of `file`."""
    return dict(zip(SIZES, _HEADER.unpack_from(file)[-len(SIZES) :], strict=True))
