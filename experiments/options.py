"""The command line, made from the dataclasses of the library.

Two passes: the first reads which task, method, subspace and model; the second offers the options
of just these. An option has the plain name of its field where one part owns that name
(``--inner-steps``), and the part's name before it elsewhere (``--context-size``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import docstring_parser
import tyro
from tyro.conf import OmitArgPrefixes, arg

import lavajax
from lavajax.config import nearest
from lavajax.methods.base import Method

TASKS: dict[str, Any] = {"sine": lavajax.Sine, "air-quality": lavajax.AirQuality}
METHODS: dict[str, Any] = {
    "lava": lavajax.Lava(),
    "lava-converged": lavajax.lava_converged(),
    "anil": lavajax.Anil(),
    "maml": lavajax.Maml(),
    "cavia": lavajax.Cavia(),
    "ridge": lavajax.Ridge(),
    "alpaca": lavajax.Alpaca(),
    "dkt": lavajax.Dkt(),
    "imaml": lavajax.IMaml(),
}
SUBSPACES: dict[str, Any] = {
    "head": lavajax.Head(),
    "context": lavajax.Context(),
    "full": lavajax.Full(),
}
MODELS: dict[str, Any] = {"mlp": lavajax.MLP()}

# Fields whose own name says too little once it stands among the options of other parts.
_RENAMED = {("Context", "size"): "context_size", ("Context", "start"): "context_start"}
_PARTS = ("model", "point_loss", "subspace")


@dataclasses.dataclass(frozen=True)
class Choice:
    """Meta-train a method on a source of tasks, and score it on unseen ones.

    Choose task and method first; --help then shows the options of your choice.

    Attributes:
        task: source of tasks.
        method: meta-learning method; lava-converged is the setting of LAVA that we recommend.
        model: backbone.
        subspace: what adapts, where the method leaves it open.
    """

    task: Literal[tuple(TASKS)] = "sine"  # type: ignore[valid-type]
    method: Literal[tuple(METHODS)] = "lava"  # type: ignore[valid-type]
    model: Literal[tuple(MODELS)] = "mlp"  # type: ignore[valid-type]
    subspace: Literal[(*SUBSPACES, None)] = None  # type: ignore[valid-type]


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """The run.

    Attributes:
        steps: outer steps.
        seeds: number of seeds, trained together.
        seed: the first seed; it fixes everything.
        meta_batch: tasks in an outer step.
        outer_rate: peak learning rate of Adam, after a warm-up and before a cosine to 0.
        warmup: outer steps of warm-up; 1,000, or a tenth of a shorter run, where not given.
        clip: bound on the norm of the meta-gradient.
        test_tasks: unseen tasks to score on.
        out: folder for the run's files; a new one under runs/ where not given.
    """

    steps: int = 15_000
    seeds: int = 1
    seed: int = 0
    meta_batch: int = 10
    outer_rate: float = 5e-3
    warmup: int | None = None
    clip: float = 10.0
    test_tasks: int = 10_000
    out: Path | None = None

    def __post_init__(self) -> None:
        least = {"steps": 1, "seeds": 1, "meta_batch": 1, "test_tasks": 2}
        for name, minimum in least.items():
            if getattr(self, name) < minimum:
                raise ValueError(
                    f"--{name.replace('_', '-')} must be at least {minimum}, "
                    f"got {getattr(self, name)}"
                )
        if not 0 <= self.seed < 2**32 - self.seeds:
            raise ValueError(f"--seed must be between 0 and 2**32 - seeds, got {self.seed}")
        if (
            self.out is not None
            and self.out.exists()
            and (not self.out.is_dir() or any(self.out.iterdir()))
        ):
            raise ValueError(f"--out must be a new or empty folder, {self.out} is in use")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that one run needs to know."""

    task_name: str
    method_name: str
    task: Any
    method: Method
    run: RunOptions


def parse(args: Sequence[str]) -> Settings:
    """Reads a command line.

    Raises:
        ValueError: a setting is impossible; the message has the reason.
        SystemExit: help was asked for, or an option is unknown.
    """
    asks_help = any(a in ("-h", "--help") for a in args)
    first = [a for a in args if a not in ("-h", "--help")]
    choice, rest = tyro.cli(Choice, args=first, prog="run.py", return_unknown_args=True)
    template = _method(choice)
    parts: dict[str, Any] = {
        "task": TASKS[choice.task],
        "method": template,
        **{name: getattr(template, name) for name in _PARTS if hasattr(template, name)},
        "run": RunOptions,
    }
    options = _options(choice, parts)
    _check_names(rest, parts)
    parsed = tyro.cli(
        OmitArgPrefixes[options],  # type: ignore[valid-type, misc]
        args=[*rest, "--help"] if asks_help else rest,
        prog="run.py",
    )
    built = {name: _build(part, getattr(parsed, name, None)) for name, part in parts.items()}
    settable = {f.name for f in dataclasses.fields(template)}
    nested = {name: built[name] for name in _PARTS if name in settable and name in built}
    method = dataclasses.replace(built["method"], **nested)
    return Settings(choice.task, choice.method, built["task"], method, built["run"])


def _check_names(args: Sequence[str], parts: dict[str, Any]) -> None:
    """Refuses an unknown option, with the nearest known one."""
    names = {name.replace("_", "-") for part in parts.values() for _, name in _own_fields(part)}
    known = [f"--{name}" for name in names] + [f"--no-{name}" for name in names]
    for word in args:
        option = word.split("=")[0].replace("_", "-")
        if option.startswith("--") and option not in known:
            raise ValueError(
                f"{option} is not an option of this task and method{nearest(option, known)}; "
                "--help lists them"
            )


def _method(choice: Choice) -> Any:
    """The chosen method with the chosen parts and otherwise its defaults."""
    method = METHODS[choice.method]
    if hasattr(method, "model"):
        method = dataclasses.replace(method, model=MODELS[choice.model])
    if choice.subspace is None:
        return method
    if not _has_choice(method):
        fixed = getattr(method, "subspace", None)
        adapts = f"always adapts {type(fixed).__name__.lower()}" if fixed else "has no such part"
        able = ", ".join(name for name, template in METHODS.items() if _has_choice(template))
        raise ValueError(f"--subspace is a choice for {able}: {choice.method} {adapts}")
    subspace = SUBSPACES[choice.subspace]
    if type(method.subspace) is type(subspace):
        return method  # with the method's own defaults for it
    return dataclasses.replace(method, subspace=subspace)


def _has_choice(method: Any) -> bool:
    """Whether the method leaves open what adapts."""
    return any(field.name == "subspace" for field in dataclasses.fields(method))


def _options(choice: Choice, parts: dict[str, Any]) -> type:
    """A dataclass of dataclasses, one for each part, that tyro turns into options."""
    fields = [(name, _mirror(part)) for name, part in parts.items()]
    options = dataclasses.make_dataclass("Options", [f for f in fields if f[1] is not None])
    options.__doc__ = (
        f"Meta-train {choice.method} on {choice.task} and score it on unseen tasks.\n\n"
        "These are the options of this choice. Choose others, and ask --help again, by "
        f"--task {{{','.join(TASKS)}}}, --method {{{','.join(METHODS)}}}"
        + (f", --model {{{','.join(MODELS)}}}" if "model" in parts else "")
        + (f", --subspace {{{','.join(SUBSPACES)}}}." if _has_choice(parts["method"]) else ".")
    )
    return options


def _own_fields(part: Any) -> list[tuple[dataclasses.Field[Any], str]]:
    """The fields of a part that are options, each with the name of its option."""
    cls = part if isinstance(part, type) else type(part)
    return [
        (f, _RENAMED.get((cls.__name__, f.name), f.name))
        for f in dataclasses.fields(cls)
        if f.name not in _PARTS
    ]


def _mirror(part: Any) -> type | None:
    """The options of a part as a dataclass: its types, its defaults, its documented help."""
    cls = part if isinstance(part, type) else type(part)
    doc = docstring_parser.parse(cls.__doc__ or "")
    about = {p.arg_name: _plain(p.description) for p in doc.params}
    hints = get_type_hints(cls)
    fields: list[Any] = []
    for field, name in _own_fields(part):
        help_text = arg(help=about.get(field.name, ""))
        kind = Annotated[hints[field.name], help_text]  # type: ignore[valid-type, name-defined]
        default = field.default if part is cls else getattr(part, field.name)
        if default is dataclasses.MISSING:
            fields.insert(0, (name, kind))
        else:
            fields.append((name, kind, dataclasses.field(default=default)))
    if not fields:
        return None
    mirror = dataclasses.make_dataclass(cls.__name__, fields)
    mirror.__doc__ = _plain(doc.short_description)
    return mirror


def _plain(text: str | None) -> str:
    """Documentation without line breaks and markup."""
    return " ".join((text or "").replace("``", "").replace("**", "").split())


def _build(part: Any, parsed: Any) -> Any:
    """The part with the values that were parsed for its mirror."""
    values = {field.name: getattr(parsed, name) for field, name in _own_fields(part)}
    return part(**values) if isinstance(part, type) else dataclasses.replace(part, **values)
