"""The JSON Schemas of the answers, from the value classes that the commands return."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from decimal import Decimal
from enum import Enum
from functools import cache
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from gpushare.hostfile.parse import schema
from gpushare.show.result import json_names, jsonable
from gpushare.show.schema import HOST_FILE

# Only the fields of classes of this package are part of an answer.
OURS = "gpushare"
PLAN: Final = "gpushare.show.plan:PlanAnswer"
_CHANGE: Final = ("gpushare.cli.mig_change:MigChangeAnswer", PLAN)
# The answers that scripts read first: each of their fields has a text.
READ_FIRST: Final = (
    "status", "jobs", "run", "farm", "advise", "doctor", "tune", "bench", "mig status", "explain"
)  # fmt: skip
# The classes of the answers, by command. `HOST_FILE`: gpushare.yaml, as a document.
ANSWERS: Final[Mapping[str, Sequence[str]]] = {
    "status": ("gpushare.show.status:StatusAnswer", "gpushare.show.legend:LegendAnswer"),
    "jobs": ("gpushare.show.jobs:JobsAnswer",),
    "doctor": ("gpushare.cli.doctor:DoctorAnswer",),
    "explain": ("gpushare.cli.explain:ExplainAnswer",),
    "observe": ("gpushare.cli.observe:ObserveAnswer",),
    # A JSON Schema itself, or the names of all.
    "schema": ("typing:Any",),
    "run": ("gpushare.run.start:RunPlanAnswer", PLAN, "gpushare.cli.run:DetachedAnswer"),
    "farm": ("gpushare.show.run:FarmAnswer", PLAN),
    "stop": ("gpushare.cli.stop:StopAnswer", PLAN),
    "logs": ("gpushare.cli.logs:LogsAnswer",),
    "mps start": (PLAN,),
    "mps stop": ("gpushare.cli.mps:MpsStopAnswer", PLAN),
    "mps status": ("gpushare.cli.mps:MpsStatusAnswer",),
    "mps set": (PLAN,),
    "mps logs": ("gpushare.cli.mps:MpsLogsAnswer",),
    "mps env": ("gpushare.cli.mps:MpsEnvAnswer",),
    "mig status": ("gpushare.cli.mig:MigStatusAnswer",),
    "mig profiles": ("gpushare.cli.mig:MigProfilesAnswer",),
    "mig fits": ("gpushare.cli.mig:MigFitsAnswer",),
    "mig plan": ("gpushare.cli.mig:MigPlanAnswer",),
    "mig create": _CHANGE,
    "mig destroy": _CHANGE,
    "mig apply": _CHANGE,
    "mig enable": _CHANGE,
    "mig disable": _CHANGE,
    "mig recover": ("gpushare.cli.mig_change:MigRecoverAnswer",),
    "mig check": ("gpushare.cli.mig_files:MigCheckAnswer",),
    "mig env": ("gpushare.cli.mig:MigEnvAnswer",),
    "mig grant": (PLAN,),
    "mig revoke": (PLAN,),
    "mig name": (PLAN,),
    "timeslice show": ("gpushare.cli.timeslice:TimesliceAnswer",),
    "timeslice set": (PLAN,),
    "timeslice reset": (PLAN,),
    "timeslice keep": ("gpushare.show.keep:KeepAnswer", "gpushare.show.keep:KeepPlanAnswer"),
    "pause": ("gpushare.cli.pause:PauseAnswer", PLAN),
    "pause list": ("gpushare.cli.pause:PauseListAnswer",),
    "resume": ("gpushare.cli.resume:ResumeAnswer", PLAN),
    "swap out": ("gpushare.cli.swap:SwapAnswer", PLAN),
    "swap in": ("gpushare.cli.swap:SwapAnswer", PLAN),
    "swap list": ("gpushare.cli.swap:SwapListAnswer",),
    "move": ("gpushare.cli.move:MoveAnswer",),
    "reserve": ("gpushare.cli.reserve:LeasesAnswer", PLAN),
    "advise": ("gpushare.advice.advise:AdviceAnswer", *_CHANGE),
    "compare": ("gpushare.cli.compare:CompareAnswer",),
    "bench": ("gpushare.base.benchmark:BenchAnswer", "gpushare.base.benchmark:BenchSizesAnswer", PLAN),
    "tune": ("gpushare.show.tune:TuneAnswer",),
    "savings": ("gpushare.cli.savings:SavingsAnswer",),
    "apply": ("gpushare.cli.apply:ApplyAnswer", PLAN),
    "diff": ("gpushare.cli.diff:DiffAnswer",),
    "capture": (HOST_FILE,),
    **{
        f"export {engine}": ("gpushare.cli.export:ExportAnswer",)
        for engine in ("k8s", "dra", "karpenter", "slurm", "mig-parted", "cdi", "docker", "compose", "ecs", "systemd")
    },
    "export prometheus": ("gpushare.cli.metrics:PrometheusAnswer",),
    "sim list": ("gpushare.cli.sim:SimHostsAnswer", "gpushare.cli.sim:SimModelsAnswer"),
    **{f"sim {verb}": ("gpushare.sim.admin:ShownHost",) for verb in ("show", "mig", "vgpu", "fault", "cdi")},
    "sim reset": ("gpushare.cli.sim:SimResetAnswer", PLAN),
    "sim add": ("gpushare.cli.sim:SimProcessAnswer",),
    "sim end": ("gpushare.cli.sim:SimProcessAnswer",),
}


def schemas() -> str:
    """Return the file of package data: the schema of the ``data`` of each command, and what they share."""
    definitions: dict[str, Any] = {}
    answers = {}
    for command, names in ANSWERS.items():
        kinds = [schema() if name == HOST_FILE else _schema(_loaded(name), definitions) for name in names]
        answers[command] = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    texts = field_texts()
    first = definitions_in([answers[command] for command in READ_FIRST], definitions)
    for name, definition in definitions.items():
        for key, field in definition["properties"].items():
            text = texts.get(f"{name}.{key}", texts.get(key) if name in first else None)
            if text is not None:
                can_be_null = "null" in json.dumps(field)
                field.setdefault("description", text if can_be_null else re.sub(r"; null: .*", ".", text))
    return json.dumps({"answers": answers, "$defs": dict(sorted(definitions.items()))}, indent=1) + "\n"


def field_texts() -> dict[str, str]:
    """Return the texts of `field_texts.yaml`, by the name of a field, or by class and name."""
    texts: dict[str, str] = yaml.safe_load((Path(__file__).parent / "field_texts.yaml").read_text(encoding="utf-8"))
    return texts


def definitions_in(schemas: Any, definitions: Mapping[str, Any]) -> set[str]:
    """Return the names of all definitions that schemas are made of."""
    names: set[str] = set()
    rest = [schemas]
    while rest:
        part = rest.pop()
        if isinstance(part, dict):
            name = part.get("$ref", "").rpartition("/")[2]
            if name and name not in names:
                names.add(name)
                rest.append(definitions[name])
            rest += part.values()
        elif isinstance(part, list):
            rest += part
    return names


def _loaded(name: str) -> Any:
    module, _, kind = name.partition(":")
    return getattr(import_module(module), kind)


_PLAIN: Final[Mapping[Any, str]] = {
    NoneType: "null", bool: "boolean", int: "integer", float: "number", Decimal: "number", str: "string", Path: "string",
}  # fmt: skip


def _schema(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a type; value classes become definitions."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in _PLAIN:
        return {"type": _PLAIN[kind]}
    if kind in {Any, object}:
        return {}
    if origin is not None:
        return _generic(origin, arguments, definitions)
    if issubclass(kind, Enum):
        return {"enum": [jsonable(value) for value in kind]}
    if not is_dataclass(kind) and not hasattr(kind, "_fields"):
        raise TypeError(f"{kind} is no part of an answer")
    _define(kind, definitions)
    return {"$ref": f"#/$defs/{kind.__name__}"}


def _generic(origin: Any, arguments: Sequence[Any], definitions: dict[str, Any]) -> dict[str, Any]:
    if origin is Annotated:
        return _schema(arguments[0], definitions)
    if origin is Literal:
        return {"enum": [jsonable(value) for value in arguments]}
    if origin in {Union, UnionType}:
        return _union([_schema(each, definitions) for each in arguments])
    if origin is tuple and arguments[-1:] != (...,):
        return {"type": "array", "prefixItems": [_schema(each, definitions) for each in arguments], "items": False}
    if issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _schema(arguments[1], definitions)}
    return {"type": "array", "items": _schema(arguments[0], definitions)}


def _union(kinds: list[dict[str, Any]]) -> dict[str, Any]:
    if all(list(kind) == ["type"] for kind in kinds):
        return {"type": [kind["type"] for kind in kinds]}
    return {"anyOf": kinds}


def _define(kind: Any, definitions: dict[str, Any]) -> None:
    """Add the schema of a value class."""
    name, source = kind.__name__, f"{kind.__module__}.{kind.__qualname__}"
    if name in definitions:
        if definitions[name]["$comment"] != source:
            raise TypeError(f"two value classes are called {name}: {definitions[name]['$comment']} and {source}")
        return
    definition = definitions[name] = {
        "$comment": source,
        "description": _words_of_json(" ".join((kind.__doc__ or "").replace("`", "").split())),
        "type": "object",
    }
    hints, comments = _hints(kind), _comments(kind)
    properties = {}
    for key in json_names(kind):
        hint = hints[key] if key in hints else _hints_of(getattr(kind, key).fget)["return"]
        properties[key] = _schema(hint, definitions) | (
            {"description": _words_of_json(comments[key])} if key in comments else {}
        )
    definition |= {"properties": properties, "required": list(properties), "additionalProperties": False}
    definitions[name] = definition


def _words_of_json(text: str) -> str:
    """Return a description of Python's values as one of JSON's: null for None, true and false."""
    return re.sub(r"\b(None|True|False)\b", lambda value: json.dumps(ast.literal_eval(value[0])), text)


def _hints(kind: Any) -> dict[str, Any]:
    """Return the types of the fields, those that a module imports only for type checkers too."""
    hints: dict[str, Any] = {}
    for each in reversed(kind.__mro__):
        if each.__module__.startswith(OURS):
            names = _names(each.__module__)
            for key, text in vars(each).get("__annotations__", {}).items():
                # Of a named tuple they are forward references.
                text = getattr(text, "__forward_arg__", text)
                if not text.startswith("ClassVar"):
                    hints[key] = eval(text, names)  # noqa: S307 - annotations of our own
    return hints


def _hints_of(function: Any) -> dict[str, Any]:
    return get_type_hints(function, globalns=_names(function.__module__))


@cache
def _names(module: str) -> dict[str, Any]:
    """Return the names of a module, with those of its ``if TYPE_CHECKING`` blocks."""
    loaded = import_module(module)
    names = dict(vars(loaded))
    for node in ast.parse(inspect.getsource(loaded)).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            exec(ast.unparse(ast.Module(node.body, [])), names)  # noqa: S102 - imports of our own
    return names


def _comments(kind: Any) -> dict[str, str]:
    """Return the comment above each field, as a sentence of its own."""
    comments: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        if each.__module__.startswith(OURS):
            comments |= dict(_comments_of(each))
    return comments


def _comments_of(kind: Any) -> Iterator[tuple[str, str]]:
    lines = inspect.getsource(kind).splitlines()
    above: list[str] = []
    for line in lines:
        text = line.strip()
        if text.startswith("# "):
            above.append(text[2:])
            continue
        name, colon, _ = text.partition(":")
        if above and colon and name.isidentifier():
            yield name, " ".join(above).replace("`", "")
        above = []
