"""The public surface is a list; a change to it is a change to this file."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys

import statehold
from statehold.options import Options

PUBLIC = [
    "Checkpointer",
    "CopiedStep",
    "Directory",
    "Gated",
    "Interval",
    "Io",
    "Keep",
    "Level",
    "LevelStatus",
    "Memory",
    "ObjectStore",
    "RestoreReport",
    "Rng",
    "Run",
    "Save",
    "SaveStats",
    "StateholdError",
    "Step",
    "Subscription",
    "TensorInfo",
    "Update",
    "Volatile",
    "__version__",
    "allow_tensor_class",
    "copy_step",
    "errors",
    "export_step",
    "import_step",
    "lineage",
    "load",
    "metrics",
    "offload",
    "open",
    "resilience",
    "subscribe",
]

SIGNATURES = {
    statehold.Checkpointer.__init__: (
        "(self, run, *, keep=None, parent=None, levels=None, staging_bytes=None, "
        "coordination='auto', peer_timeout_s=600.0, node_mtbf=None, nodes=None, trace=None, "
        "on_commit=None, io=None)"
    ),
    statehold.Checkpointer.save: "(self, step, state, *, metrics=None, tags=(), force=False)",
    statehold.Checkpointer.restore: (
        "(self, state, step=None, *, best=None, mode=None, tag=None, source=None, prefix=False, "
        "only=None, skip=None, "
        "rename=None, strict=True, cast=False)"
    ),
    statehold.Checkpointer.gate: "(self, timeout=None)",
    statehold.Checkpointer.steps: "(self)",
    statehold.Checkpointer.rewind: "(self, step)",
    statehold.Checkpointer.levels: "(self)",
    statehold.Checkpointer.leave_on: "(self, *signals, within_s)",
    statehold.Checkpointer.leave: "(self, within_s=None)",
    statehold.Checkpointer.is_last: "(self, step)",
    statehold.Checkpointer.flush: "(self, timeout=None)",
    statehold.Checkpointer.write_trace: "(self, path=None)",
    statehold.Checkpointer.close: "(self)",
    statehold.metrics.serve: "(port, host='127.0.0.1')",
    statehold.export_step: "(step, destination, to, *, name=None, config=None, report=None)",
    statehold.import_step: "(source, step, *, name=None, skip=None, report=None)",
    statehold.copy_step: "(step, destination, *, link=True, report=None)",
    statehold.load: (
        "(run, name='', *, step=None, mapped=False, verify=True, device='cpu', rank=None)"
    ),
    statehold.open: "(run)",
    statehold.subscribe: "(run, state)",
    statehold.Subscription.wait: "(self, timeout=None)",
    statehold.Subscription.close: "(self)",
    statehold.Update.apply: "(self)",
    statehold.Update.skip: "(self)",
    statehold.Save.wait: "(self, event='committed', timeout=None)",
    statehold.Save.done: "(self, event='committed')",
    statehold.allow_tensor_class: "(cls, *, rowwise=(), shared=())",
}

IO = [
    "buffer_bytes",
    "queue_depth",
    "copy_threads",
    "backend",
    "profile",
    "reuse_files",
    "share_files",
    "address",
]


def test_public_names() -> None:
    assert statehold.__all__ == PUBLIC
    assert all(hasattr(statehold, name) for name in PUBLIC)
    assert dir(statehold) == sorted(PUBLIC)


def test_signatures() -> None:
    for function, expected in SIGNATURES.items():
        signature = inspect.signature(function)
        bare = signature.replace(
            parameters=[
                p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()
            ],
            return_annotation=inspect.Signature.empty,
        )
        assert str(bare) == expected, function.__qualname__
    assert [field.name for field in dataclasses.fields(statehold.Io)] == IO
    taken = list(inspect.signature(statehold.Checkpointer).parameters)
    assert sorted(taken) == sorted(
        ["run", "levels", *(each.name for each in dataclasses.fields(Options))]
    )


def test_every_error_is_exported_and_documented() -> None:
    found = [
        name
        for name, value in vars(statehold.errors).items()
        if inspect.isclass(value) and issubclass(value, Exception)
    ]
    assert sorted(found) == sorted(statehold.errors.__all__)
    assert statehold.errors.__doc__ is not None
    assert all(name in statehold.errors.__doc__ for name in found)
    assert all(issubclass(getattr(statehold.errors, n), statehold.StateholdError) for n in found)


def test_import_is_light() -> None:
    code = (
        "import sys, statehold; statehold.StateholdError; "
        "heavy = {'torch', 'numpy', 'statehold._core'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert result.returncode == 0, result.stderr
