"""A folder of captures that later processes use instead of tracing.

The name of a file is a hash of everything that the trace depends on, so that any change leads to another
file. A file is a zip archive of JSON and of a safetensors file: nothing is unpickled. If a file is damaged,
or was written by something else, the model is retraced, with a warning.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import platform
import sys
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

import graphplan._compat
import graphplan.capture
from graphplan.capture.captured_graph import Capture
from graphplan.capture.model.model_copy import ModelCopy
from graphplan.capture.model.model_weights import identity, is_dense, named_tensors
from graphplan.capture.saved.description import Description
from graphplan.capture.saved.plain_capture import made_capture, plain_capture
from graphplan.capture.saved.plain_values import NotSavedError
from graphplan.capture.saved.source_files import changed_file, loaded_files
from graphplan.capture.signature import BoundCall, leaf_names
from graphplan.errors import InputError, PlanError
from graphplan.message_text import first_line
from graphplan.passes import frontend, training
from graphplan.version import __version__
from graphplan.versioned_json import Format
from graphplan.warnings import warn
from graphplan.whole_files import write_whole

logger = logging.getLogger("graphplan")

_FORMAT = Format("graphplan-capture", 4, "captured graph")
_JSON, _TENSORS = "capture.json", "constants.safetensors"
_TRACERS = (graphplan.capture, graphplan._compat, frontend, training)
_DAMAGED = (OSError, zipfile.BadZipFile, zlib.error, KeyError, EOFError, PlanError, SafetensorError)


@dataclass(frozen=True, slots=True)
class Origin:
    """The inputs of a trace, hashed.

    Attributes:
        key: hash of everything on which the trace depends.
        tensors: identities of the tensors whose values are in the hash.
    """

    key: str
    tensors: frozenset[Any]


class SavedCaptures:
    """Reads and writes the files of a folder, which is created if needed.

    Several processes may use one folder at the same time: a file gets its name only once it is complete.

    Raises:
        InputError: the path is not a folder, or the folder cannot be created.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            self.folder = Path(folder).expanduser()
            self.folder.mkdir(parents=True, exist_ok=True)
        except (OSError, TypeError) as error:
            raise InputError(
                f"capture_cache must be a folder, and {str(folder)!r} is none: {error}"
            ) from error

    def read(self, origin: Origin, call: BoundCall, model_copy: ModelCopy) -> Capture | None:
        """Return the capture of a call and repeat the warnings of its trace; None if no file is usable."""
        path = self._path(origin)
        if not path.is_file():
            return None
        try:
            with zipfile.ZipFile(path) as archive:
                text, tensors = archive.read(_JSON), archive.read(_TENSORS)
            plain = _FORMAT.parse(text.decode())
            if plain["key"] != origin.key:
                raise PlanError("its key does not match its file name")
            changed = changed_file(plain["files"])
            if changed is not None:
                logger.info("%s has changed: retracing the model", changed)
                return None
            constants = safetensors.torch.load(tensors)
            capture = made_capture(plain["capture"], constants, call)
        except (*_DAMAGED, UnicodeDecodeError) as error:
            warn(f"{path} is damaged ({first_line(error)}): retracing the model")
            return None
        except NotSavedError as error:
            warn(f"{path} cannot be used here ({error}): retracing the model")
            return None
        logger.info("the capture of %s was read from %s", type(model_copy.module).__name__, self.folder)
        if plain["fixed"]:
            model_copy.code.sizes_fixed = True
        for message in plain["warnings"]:
            model_copy.warn_once(message)
        return capture

    def write(
        self, origin: Origin, found: Capture, call: BoundCall, warnings: Sequence[str], *, fixed: bool
    ) -> None:
        """Save a capture for later processes; warn why if that is not possible."""
        try:
            plain, constants = plain_capture(found)
            text = json.dumps(plain)
            reread, _ = plain_capture(made_capture(json.loads(text), constants, call))
            if json.dumps(reread) != text:
                raise NotSavedError("reading it back does not give the traced graph")
            notes = {"key": origin.key, "files": loaded_files(), "warnings": list(warnings), "fixed": fixed}
            file = io.BytesIO()
            with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr(_JSON, json.dumps({**_FORMAT.head(), **notes, "capture": plain}))
                archive.writestr(_TENSORS, safetensors.torch.save(constants))
            write_whole(self._path(origin), file.getvalue())
        except (NotSavedError, OSError) as error:
            warn(f"the trace is not saved in capture_cache: {error}")

    def _path(self, origin: Origin) -> Path:
        return self.folder / f"{origin.key}.zip"


def origin_of(model_copy: ModelCopy, call: BoundCall, *settings: Any) -> Origin | None:
    """Return the origin of a call's trace, with ``settings`` of the trace.

    Return None, with a warning, if something on which the trace depends cannot be hashed.
    """
    module = model_copy.module
    weights = named_tensors(module)
    description = Description({id(tensor): name for name, tensor in weights.items()})
    try:
        _hash_process(description)
        for name, tensor in weights.items():
            description.update(name, model_copy.weights.first[model_copy.full_name(name)], *_shape(tensor))
        description.update(model_copy.entry, *model_copy.device_types, model_copy.autocast)
        for name, leaf in zip(leaf_names(call), call.leaves, strict=True):
            _hash_leaf(description, name, leaf)
        description.add((call.spec, settings), "the options of the trace")
        description.add_torch()
        description.add(module, type(module).__name__)
    except NotSavedError as error:
        model_copy.warn_once(f"capture_cache is not used for {type(module).__name__}: {error}")
        return None
    return Origin(description.digest(), frozenset(description.tensors))


def can_save(capture: Capture, origin: Origin) -> bool:
    """Whether all constants of a trace that is not simplified yet come from its origin; warn if not.

    These are literals of the code, which the graph copies at each call, and attributes. Others are tensors
    that the code found elsewhere, such as in a global variable of a package.
    """
    literals = {
        node.name
        for node in capture.graph.find_nodes(op="placeholder")
        if node.users and all(user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users)
    }
    if capture.branches:
        warn("the trace is not saved in capture_cache: the model's code branches on values of weights")
        return False
    for node, name in capture.weights.items():
        constant = None if node in literals else capture.constants.get(name)
        if constant is not None and identity(constant) not in origin.tensors:
            warn(
                f"the trace is not saved in capture_cache: the source of the constant {name!r} was not found"
            )
            return False
    return True


def _shape(tensor: torch.Tensor) -> tuple[object, ...]:
    return type(tensor).__name__, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.requires_grad


def _hash_leaf(description: Description, name: str, leaf: Any) -> None:
    if not isinstance(leaf, torch.Tensor):
        description.add(leaf, name)
    elif is_dense(leaf):
        description.update("tensor", *_shape(leaf))
    else:
        raise NotSavedError(f"{name} is a {type(leaf).__name__}, {leaf.layout}")


def _hash_process(description: Description) -> None:
    """Hash what a trace depends on in this process: versions, graphplan's code, settings of torch."""
    try:
        transformers = version("transformers")
    except PackageNotFoundError:
        transformers = ""
    description.update(__version__, _own_code(), torch.__version__, torch.version.git_version, transformers)
    description.update(platform.python_implementation(), sys.version, platform.machine())
    cuda = torch.backends.cuda
    description.update(
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.cuda.is_available(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
        *(cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()),
    )


@lru_cache(maxsize=1)
def _own_code() -> str:
    """Return a hash of graphplan's tracing code."""
    code_hash = hashlib.sha256()
    for package in _TRACERS:
        for file in sorted(Path(package.__path__[0]).rglob("*.py")):
            code_hash.update(file.read_bytes())
    return code_hash.hexdigest()
