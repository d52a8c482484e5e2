"""Places in a command, its environment and its config files where sizes are filled in."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from batchfinder.configs.files import READERS, with_number
from batchfinder.errors import InvalidValue

BATCH_SIZE, ACCUMULATION, SEQ_LEN = "batch_size", "accumulation", "seq_len"
PLACEHOLDERS = (BATCH_SIZE, ACCUMULATION, SEQ_LEN)


def filled(text: str, values: Mapping[str, int]) -> str:
    """A text with numbers in the place of `{batch_size}` and its like; other braces stay as they are."""
    return re.sub(r"\{(\w+)\}", lambda match: str(values.get(match[1], match[0])), text)


def names_in(texts: Sequence[str]) -> set[str]:
    """Which placeholders stand in some texts."""
    return {name for name in PLACEHOLDERS if any(f"{{{name}}}" in text for text in texts)}


@dataclass(frozen=True, slots=True)
class ConfigPlace:
    """A number in a config file.

    Attributes:
        file: its path, from the folder that the command runs in.
        key: of the number, such as `train.micro_batch_size`; of a list's items, their places from 0.
        placeholder: what it stands for.
    """

    file: str
    key: str
    placeholder: str

    @classmethod
    def parse(cls, text: str) -> ConfigPlace:
        """Read `cfg.yaml:train.micro_batch_size`, or `cfg.yaml:train.accumulation={accumulation}`.

        Raises:
            InvalidValue: it is neither.
        """
        place, _, placeholder = text.partition("=")
        file, _, key = place.rpartition(":")
        name = placeholder.strip("{}") or BATCH_SIZE
        if not file or not key or name not in PLACEHOLDERS:
            expected = "FILE:KEY or FILE:KEY={accumulation}, such as cfg.yaml:micro_batch_size"
            raise InvalidValue("--in", text, expected)
        if Path(file).suffix.lower() not in READERS:
            raise InvalidValue("--in", text, f"a file that ends in {', '.join(READERS)}")
        return cls(file, key, name)

    def write(self, folder: Path, number: int) -> None:
        """Put a number into the file that lies in a folder; all else in it stays as it is.

        Raises:
            InvalidValue: the file cannot be read, or has no such number.
        """
        path = folder / self.file
        if not path.resolve().is_relative_to(folder.resolve()):  # a scratch copy would not have it
            raise InvalidValue(
                "--in", self.file, "a file in the folder that the command runs in, by its path from there"
            )
        try:
            text = path.read_text()
            READERS[path.suffix.lower()](text)
        except (OSError, ValueError) as error:
            raise InvalidValue("--in", self.file, f"a file that can be read ({error})") from error
        try:
            path.write_text(with_number(text, self.file, self.key, number))
        except KeyError:
            raise InvalidValue("--in", f"{self.file}:{self.key}", "the key of a whole number in that file") from None
        except ValueError:
            raise InvalidValue("--in", f"{self.file}:{self.key}", "a number that is written as such") from None
