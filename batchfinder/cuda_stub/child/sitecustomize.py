"""Runs at the start of every Python process on the stub, before anything else: it has modules imported after torch.

Where it is asked to, it also notes which files the process opens to read them.
"""

import importlib.machinery
import importlib.util
import os
import sys

_VARIABLE = "BATCHFINDER_STUB_AFTER_TORCH"
opened = set()


class _AfterTorch:
    """Imports the modules that the variable names once torch is imported, which is not when something looks for it."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        others = (each.find_spec(name, path, target) for each in sys.meta_path if each is not self)
        spec = next((each for each in others if each is not None), None)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_go_on(module):
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            run(module)
            for each in os.environ[_VARIABLE].split():
                importlib.import_module(each)

        spec.loader.exec_module = run_and_go_on
        return spec


def _note_opened(event, arguments):
    if event == "open" and isinstance(arguments[0], str) and arguments[2] & os.O_ACCMODE == os.O_RDONLY:
        opened.add(arguments[0])


def _run_hidden():
    """The environment's own sitecustomize, which this one hides."""
    here = os.path.dirname(os.path.abspath(__file__))
    searched = [folder for folder in sys.path if os.path.abspath(folder) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", searched)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get(_VARIABLE):
    sys.meta_path.insert(0, _AfterTorch())
if os.environ.get("BATCHFINDER_STUB_NOTE_OPENED"):
    sys.addaudithook(_note_opened)
_run_hidden()
