"""What a shared library asks of others: libraries, symbols that it does not define, and names that it looks up."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchfinder.cuda_stub.errors import StubUnavailable

if TYPE_CHECKING:
    from elftools.elf.elffile import ELFFile

_SYMBOL = struct.Struct("<IBBHQQ")
_UNDEFINED = 0


@dataclass(frozen=True, slots=True)
class Undefined:
    """A symbol that a library finds elsewhere.

    Attributes:
        library: the library that its version names; None for one without a version.
        version: the version's name; None likewise.
    """

    name: str
    library: str | None
    version: str | None


def read_undefined(path: Path) -> tuple[list[str], list[Undefined]]:
    """The libraries that a library needs, and its undefined symbols.

    Raises:
        StubUnavailable: it is not a whole ELF library.
    """
    with _opened(path) as elf:
        dynamic: Any = elf.get_section_by_name(".dynamic")
        table: Any = elf.get_section_by_name(".dynsym")
        if dynamic is None or table is None:
            return [], []
        needed = [tag.needed for tag in dynamic.iter_tags() if tag.entry.d_tag == "DT_NEEDED"]
        names = elf.get_section(table["sh_link"]).data()
        versions: Any = elf.get_section_by_name(".gnu.version")
        numbers = versions.data() if versions is not None else b""
        known: dict[int, tuple[str, str]] = {}
        required: Any = elf.get_section_by_name(".gnu.version_r")
        if required is not None:
            for library, all_of_it in required.iter_versions():
                known.update({each["vna_other"]: (library.name, each.name) for each in all_of_it})
        found = []
        for index, (name, _info, _other, section, _value, _size) in enumerate(_SYMBOL.iter_unpack(table.data())):
            if section != _UNDEFINED or not name:
                continue
            number = struct.unpack_from("<H", numbers, 2 * index)[0] & 0x7FFF if numbers else 0
            library, version = known.get(number, (None, None))
            found.append(Undefined(names[name : names.index(b"\0", name)].decode(), library, version))
        return needed, found


def read_names(path: Path, pattern: str) -> list[str]:
    """The constant strings of a library that match a pattern: names of functions that it looks up when it runs.

    Raises:
        StubUnavailable: it is not a whole ELF library.
    """
    with _opened(path) as elf:
        constants = elf.get_section_by_name(".rodata")
        data = constants.data() if constants is not None else b""
        return sorted(
            {each.decode() for each in re.findall(rb"(?:\A|(?<=\0))(?:" + pattern.encode() + rb")(?=\0)", data)}
        )


@contextmanager
def _opened(path: Path) -> Iterator[ELFFile]:
    # Here, where a stub is compiled: each process on one imports this package.
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile

    try:
        with path.open("rb") as file:
            yield ELFFile(file)
    except (ELFError, struct.error, ValueError, UnicodeDecodeError) as error:
        raise StubUnavailable(f"{path} is not a whole library ({error}): install its package again") from error
    except OSError as error:
        raise StubUnavailable(f"{path} cannot be read: {error.strerror}") from error
