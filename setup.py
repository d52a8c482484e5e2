"""What setup.cfg cannot say: the README for a package index, where links to files of the repository lead nowhere."""

import re
from pathlib import Path

from setuptools import setup

RELATIVE = r"\((?!https?:|#)[^)]*\)"

readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
readme = re.sub(rf"!\[[^\]]*\]{RELATIVE}\n*", "", readme)
readme = re.sub(rf"\[([^\]]*)\]{RELATIVE}", r"\1", readme)

setup(long_description=readme, long_description_content_type="text/markdown")
