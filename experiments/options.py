"""The command line, made from the dataclasses of the library.

Two passes: the first reads which task, method, subspace and model; the second offers the options
of just these. An option has the plain name of its field where one part owns that name
(``--inner-steps``), and the part's name before it elsewhere (``--context-size``). Several names
are given with commas between them (``--x=TEMP,PRES``), one that has a comma itself in double
quotes (``--x='"PM2,5",TEMP'``).
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import docstring_parser
import tyro
from tyro.conf import OmitArgPrefixes, arg

import lavajax
from folder import CONFIG, read_json
from lavajax.checkpoint import CHECKPOINTS
from lavajax.config import from_json, nearest, to_json
from lavajax.methods.base import Method

TASKS: dict[str, Any] = {
    "sine": lavajax.Sine,
    "fitzhugh-nagumo": lavajax.FitzHughNagumo,
    "mass-spring": lavajax.MassSpring,
    "mass-spring-shifted": lavajax.MassSpring.shifted(),
    "pendulum": lavajax.Pendulum,
    "pendulum-shifted": lavajax.Pendulum.shifted(),
    "van-der-pol": lavajax.VanDerPol,
    "cartpole": lavajax.Cartpole,
    "air-quality": lavajax.AirQuality,
    "radio": lavajax.Radio,
    "omniglot": lavajax.Omniglot,
    "mini-imagenet": lavajax.MiniImageNet,
    "table": lavajax.Table,
}
METHODS: dict[str, Any] = {
    "lava": lavajax.Lava(),
    "lava-converged": lavajax.lava_converged(),
    "lava-bayesian": lavajax.lava_bayesian(),
    "anil": lavajax.Anil(),
    "maml": lavajax.Maml(),
    "cavia": lavajax.Cavia(),
    "meta-sgd": lavajax.MetaSgd(),
    "reptile": lavajax.Reptile(),
    "llama": lavajax.Llama(),
    "vfml": lavajax.Vfml(),
    "vr-maml": lavajax.vr_maml_tuned(),
    "vr-maml-released": lavajax.vr_maml_released(),
    "meta-mix": lavajax.MetaMix(),
    "platipus": lavajax.Platipus(),
    "bmaml": lavajax.Bmaml(),
    "hyper-network": lavajax.HyperNetwork(),
    "cnp": lavajax.Cnp(),
    "attentive-cnp": lavajax.AttentiveCnp(),
    "tnp": lavajax.Tnp(),
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
MODELS: dict[str, Any] = {"mlp": lavajax.MLP(), "conv4": lavajax.Conv4()}
LOSSES: dict[str, Any] = {
    "squared": lavajax.SquaredError(),
    "direction": lavajax.DirectionError(),
    "huber": lavajax.Huber(),
    "gaussian": lavajax.GaussianNll(),
}

# Fields whose own name says too little once it stands among the options of other parts.
_RENAMED = {
    ("Context", "size"): "context_size",
    ("Context", "start"): "context_start",
    ("HyperNetwork", "activation"): "hyper_activation",
    ("Conditioned", "encoder"): "encoding_hidden",
    ("Conditioned", "encoding"): "encoding_width",
    ("Conditioned", "activation"): "encoding_activation",
}
_PARTS = ("model", "point_loss", "subspace")
_NAMES = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Choice:
    """Meta-train a method on a source of tasks, and score it on unseen ones.

    Choose task and method first; --help then shows the options of your choice.

    Attributes:
        resume: folder of a run to go on with; its settings are its own, and nothing else is given.
        eval: a saved model, or the folder of a run, to score without training.
        task: source of tasks.
        method: meta-learning method; lava-converged is the setting of LAVA that we recommend.
        model: backbone; the task's own where not given: conv4 for images, mlp for all others.
        subspace: what adapts, where the method leaves it open.
        loss: of real targets, the squared error where not given: direction where targets are
            vectors of length 1, huber where there are outliers, gaussian to predict their variance
            too; of classes it is their cross-entropy, and no choice.
        conditioned: give the method with every input a summary of the support, as seen from there,
            so that a head is no longer linear in its targets; for vectors of inputs and real
            targets.
    """

    resume: Path | None = None
    eval: Path | None = None
    task: Literal[tuple(TASKS)] = "sine"  # type: ignore[valid-type]
    method: Literal[tuple(METHODS)] = "lava"  # type: ignore[valid-type]
    model: Literal[(*MODELS, None)] = None  # type: ignore[valid-type]
    subspace: Literal[(*SUBSPACES, None)] = None  # type: ignore[valid-type]
    loss: Literal[(*LOSSES, None)] = None  # type: ignore[valid-type]
    conditioned: bool = False


@dataclasses.dataclass(frozen=True)
class Variant:
    """What any task may be changed by.

    Attributes:
        label_noise: standard deviation of Gaussian noise on targets.
        noise_on: on the targets of the support alone, or of both.
        fixed_tasks: train on this many tasks of fixed points; on ever fresh ones where not given.
        fixed_seed: of the fixed tasks, which are the same for all seeds of the run.
    """

    label_noise: float = 0.0
    noise_on: Literal["support", "both"] = "support"
    fixed_tasks: int | None = None
    fixed_seed: int = 0

    def of(self, task: Any) -> Any:
        """The task, changed."""
        if self.fixed_tasks is not None:
            task = lavajax.FixedTasks(task, self.fixed_tasks, self.fixed_seed)
        if self.label_noise:
            task = lavajax.NoisyLabels(task, self.label_noise, self.noise_on)
        return task

    def __str__(self) -> str:
        """As a title goes on."""
        noise = f", label noise {self.label_noise:g}" if self.label_noise else ""
        return noise + (f", {self.fixed_tasks} fixed tasks" if self.fixed_tasks else "")

    @staticmethod
    def split(task: Any) -> tuple[Any, Variant]:
        """The inverse of ``of``."""
        found: dict[str, Any] = {}
        if isinstance(task, lavajax.NoisyLabels):
            found |= {"label_noise": task.std, "noise_on": task.on}
            task = task.tasks
        if isinstance(task, lavajax.FixedTasks):
            found |= {"fixed_tasks": task.number, "fixed_seed": task.seed}
            task = task.tasks
        return task, Variant(**found)


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """The run.

    Attributes:
        steps: outer steps.
        seeds: number of seeds, trained together.
        seed: the first seed; it fixes everything.
        meta_batch: tasks in an outer step.
        microbatch: tasks that a device computes at once, for a meta-batch that does not fit its
            memory; all of its share where not given, on a CPU what its caches hold.
        optimizer: adam, with warm-up, cosine and clipping; or sgd, plain, at a constant rate.
        outer_rate: learning rate of the outer loop; for adam, its peak.
        warmup: outer steps of adam's warm-up; 1,000, or a tenth of a shorter run, where not given.
        clip: bound on the norm of the meta-gradient; for adam.
        test_tasks: unseen tasks to score on at the end.
        report_every: outer steps between two reports, each with the error on 200 unseen tasks.
        checkpoint_seconds: least time between two checkpoints.
        max_skipped: the largest share of all tasks of the run that may be left out, since their
            loss or its gradient is not finite; more of them stop it.
        tensorboard: write TensorBoard logs into the run's folder.
        figures: draw three tasks and the learning curve at the end.
        out: folder for the run's files; a new one under runs/ where not given.
        overwrite: replace the run that --out holds.
    """

    steps: int = 15_000
    seeds: int = 1
    seed: int = 0
    meta_batch: int = 10
    microbatch: int | None = None
    optimizer: Literal["adam", "sgd"] = "adam"
    outer_rate: float = 5e-3
    warmup: int | None = None
    clip: float = 10.0
    test_tasks: int = 10_000
    report_every: int = 500
    checkpoint_seconds: float = 10.0
    max_skipped: float = 0.01
    tensorboard: bool = False
    figures: bool = True
    out: Path | None = None
    overwrite: bool = False

    def __post_init__(self) -> None:
        if not self.checkpoint_seconds >= 0:
            raise ValueError(
                f"--checkpoint-seconds must be at least 0, got {self.checkpoint_seconds}"
            )
        if not 0 < self.outer_rate < math.inf:
            raise ValueError(f"--outer-rate must be a finite number above 0, got {self.outer_rate}")
        if not self.clip > 0:  # infinity clips nothing
            raise ValueError(f"--clip must be a number above 0, got {self.clip}")
        if not 0 <= self.max_skipped <= 1:
            raise ValueError(f"--max-skipped must be from 0 to 1, a share, got {self.max_skipped}")
        least = {"steps": 1, "seeds": 1, "meta_batch": 1, "test_tasks": 2, "report_every": 1}
        least |= {} if self.microbatch is None else {"microbatch": 1}
        for name, minimum in least.items():
            if getattr(self, name) < minimum:
                raise ValueError(
                    f"--{name.replace('_', '-')} must be at least {minimum}, "
                    f"got {getattr(self, name)}"
                )
        if not 0 <= self.seed < 2**32 - self.seeds:
            raise ValueError(f"--seed must be between 0 and 2**32 - seeds, got {self.seed}")
        if self.overwrite and self.out is None:
            raise ValueError("--overwrite needs --out: a run without it has a folder of its own")

    @property
    def stacked(self) -> int | None:
        """The number of seeds as ``lavajax.train`` takes it: None for a single run."""
        return None if self.seeds == 1 else self.seeds


@dataclasses.dataclass(frozen=True)
class EvalOptions:
    """The evaluation.

    Attributes:
        test_tasks: unseen tasks to score on.
        test_seed: of these tasks; a run is scored with 0.
    """

    test_tasks: int = 10_000
    test_seed: int = 0

    def __post_init__(self) -> None:
        if self.test_tasks < 2:
            raise ValueError(f"--test-tasks must be at least 2, got {self.test_tasks}")
        if not 0 <= self.test_seed < 2**32:
            raise ValueError(f"--test-seed must be between 0 and 2**32, got {self.test_seed}")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that one run needs to know."""

    task_name: str
    method_name: str
    task: Any
    method: Method
    run: RunOptions

    def to_json(self) -> dict[str, Any]:
        """What a run's folder keeps of it: all but the folder."""
        run = dataclasses.asdict(self.run)
        del run["out"], run["overwrite"]
        if self.run.microbatch is None:  # as in runs from before there was a choice
            del run["microbatch"]
        names = {"task_name": self.task_name, "method_name": self.method_name}
        return {**names, "task": to_json(self.task), "method": to_json(self.method), "run": run}

    @staticmethod
    def from_json(data: Any) -> Settings:
        """The inverse.

        Raises:
            ValueError: the data is not what ``to_json`` has written.
        """
        try:
            run = dict(data["run"])
            unknown = run.keys() - {f.name for f in dataclasses.fields(RunOptions)}
            if unknown:
                raise ValueError(f"there is no option {', '.join(sorted(unknown))}")
            task, method = from_json(data["task"]), from_json(data["method"])
            return Settings(data["task_name"], data["method_name"], task, method, RunOptions(**run))
        except (KeyError, TypeError) as error:
            raise ValueError(f"the run's configuration is damaged: {error!r}") from None


@dataclasses.dataclass(frozen=True)
class Resume:
    """Go on with the run in a folder."""

    path: Path


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """Score a saved model; ``task`` is what was asked for, or the run's own."""

    path: Path
    task_name: str
    task: Any
    options: EvalOptions


def parse(args: Sequence[str]) -> Settings | Resume | Evaluate:
    """Reads a command line.

    Raises:
        ValueError: a setting is impossible; the message has the reason.
        SystemExit: help was asked for, or an option is unknown.
    """
    asks_help = any(a in ("-h", "--help") for a in args)
    first = [a for a in args if a not in ("-h", "--help")]
    choice, rest = tyro.cli(Choice, args=first, prog="run.py", return_unknown_args=True)
    help_flag = ["--help"] if asks_help else []
    if choice.resume is not None:
        others = [a for a in args if a.split("=")[0] != "--resume" and Path(a) != choice.resume]
        if others:
            raise ValueError(
                f"--resume={choice.resume} takes its settings from the run's own configuration, "
                "and no other option: another number of steps, say, would be another schedule"
            )
        return Resume(choice.resume)
    if choice.eval is not None:
        return _parse_eval(choice, args, [*rest, *help_flag])
    template = _method(choice)
    if choice.conditioned and _names_loss(TASKS[choice.task]):
        raise ValueError(f"--conditioned is a choice for real targets: {choice.task} has classes")
    if choice.conditioned and choice.model == "conv4":
        raise ValueError("--conditioned is a choice for inputs that are vectors: conv4 has images")
    own = [name for name in _PARTS if hasattr(template, name)]
    if _names_loss(TASKS[choice.task]):  # which then is no choice, and has no options
        own.remove("point_loss")
    parts: dict[str, Any] = {
        "task": TASKS[choice.task],
        "variant": Variant,
        "method": template,
        **{name: getattr(template, name) for name in own},
        **({"conditioned": lavajax.Conditioned} if choice.conditioned else {}),
        "run": RunOptions(test_tasks=_test_tasks(TASKS[choice.task])),
    }
    about = (
        f"Meta-train {choice.method} on {choice.task} and score it on unseen tasks.\n\n"
        "These are the options of this choice. Choose others, and ask --help again, by "
        f"--task {{{','.join(TASKS)}}}, --method {{{','.join(METHODS)}}}"
        + (f", --model {{{','.join(MODELS)}}}" if "model" in parts else "")
        + (f", --subspace {{{','.join(SUBSPACES)}}}" if _is_open(template) else "")
        + (f", --loss {{{','.join(LOSSES)}}}, --conditioned. " if "point_loss" in parts else ". ")
        + "--resume FOLDER goes on with a run, --eval FOLDER scores a saved model. Several "
        "processes train together, each with --coordinator HOST:PORT --processes N --process I, or "
        "with --distributed where a cluster knows these."
    )
    built = _parse_parts(parts, about, [*rest, *help_flag])
    settable = {f.name for f in dataclasses.fields(template)}
    nested = {name: built[name] for name in _PARTS if name in settable and name in built}
    if _names_loss(built["task"]):
        nested["point_loss"] = built["task"].point_loss
    method = dataclasses.replace(built["method"], **nested)
    if choice.conditioned:
        method = dataclasses.replace(built["conditioned"], method=method)
    task = built["variant"].of(built["task"])
    name = f"conditioned-{choice.method}" if choice.conditioned else choice.method
    return Settings(choice.task, name, task, method, built["run"])


def _parse_eval(choice: Choice, args: Sequence[str], rest: list[str]) -> Evaluate:
    """The task is the run's own, unless another is named; its options vary it."""
    assert choice.eval is not None
    task: Any = TASKS[choice.task]
    name: str = choice.task
    parts = ("--method", "--model", "--subspace", "--loss")
    choices = ("--task", *parts, "--conditioned", "--no-conditioned")
    given = [a for a in args if a.split("=")[0] in choices]
    if any(not a.startswith("--task") for a in given):
        raise ValueError(f"--eval scores the method that was saved; leave {given[-1]} out")
    config = choice.eval / CONFIG
    if not given and (choice.eval / CHECKPOINTS).is_dir() and config.is_file():
        settings = Settings.from_json(read_json(config))
        task, name = settings.task, settings.task_name
    about = f"Score the model saved in {choice.eval} on unseen tasks of {name}, without training."
    task, variant = Variant.split(task)
    options = EvalOptions(test_tasks=_test_tasks(task))
    built = _parse_parts({"task": task, "variant": variant, "run": options}, about, rest)
    return Evaluate(choice.eval, name, built["variant"].of(built["task"]), built["run"])


def _parse_parts(parts: dict[str, Any], about: str, args: list[str]) -> dict[str, Any]:
    """The second pass: each part with the values that were given for its options."""
    fields = [(name, _mirror(part)) for name, part in parts.items()]
    options = dataclasses.make_dataclass("Options", [f for f in fields if f[1] is not None])
    options.__doc__ = about
    _check_names(args, parts)
    parsed = tyro.cli(OmitArgPrefixes[options], args=args, prog="run.py")  # type: ignore[valid-type, misc]
    built = {name: _build(part, getattr(parsed, name, None)) for name, part in parts.items()}
    _check_used(args, built["variant"], built["run"])
    return built


def _check_used(args: Sequence[str], variant: Variant, run: RunOptions | EvalOptions) -> None:
    """Refuses an option that would have no effect beside the others."""
    given = {a.split("=")[0].replace("_", "-") for a in args}
    for option, needed, there in (
        ("--noise-on", "--label-noise", variant.label_noise),
        ("--fixed-seed", "--fixed-tasks", variant.fixed_tasks is not None),
        ("--clip", "--optimizer=adam", getattr(run, "optimizer", "adam") == "adam"),
        ("--warmup", "--optimizer=adam", getattr(run, "optimizer", "adam") == "adam"),
    ):
        if option in given and not there:
            raise ValueError(f"{option} has no effect without {needed}")


def _check_names(args: Sequence[str], parts: dict[str, Any]) -> None:
    """Refuses an unknown option, with the nearest known one."""
    names = {name.replace("_", "-") for part in parts.values() for _, name in _own_fields(part)}
    known = [f"--{name}" for name in names] + [f"--no-{name}" for name in names]
    for word in args:
        option = word.split("=")[0].replace("_", "-")
        if option.startswith("--") and option not in (*known, "--help"):
            raise ValueError(
                f"{option} is not an option of this task and method{nearest(option, known)}; "
                "--help lists them"
            )


def _names_loss(task: Any) -> bool:
    """Whether the settings of a task name the loss that a method needs for it, as classes do."""
    return hasattr(task, "point_loss")


def _test_tasks(task: Any) -> int:
    """How many tasks to score on by default: as many as the settings of the task name, if any."""
    return getattr(task, "test_tasks", RunOptions.test_tasks)


def _method(choice: Choice) -> Any:
    """The chosen method with the chosen parts and otherwise its defaults.

    Without a choice, the model is the one that the settings of the task name, or an MLP.
    """
    method = METHODS[choice.method]
    if hasattr(method, "model"):
        own = getattr(TASKS[choice.task], "model", MODELS["mlp"])
        model = own if choice.model is None else MODELS[choice.model]
        method = dataclasses.replace(method, model=model)
    if choice.loss is not None:
        if _names_loss(TASKS[choice.task]):
            raise ValueError(f"--loss is a choice for real targets: {choice.task} has classes")
        method = dataclasses.replace(method, point_loss=LOSSES[choice.loss])
    if choice.subspace is None:
        return method
    if not _is_open(method):
        own = getattr(method, "subspace", None)
        adapts = f"always adapts {type(own).__name__.lower()}" if own else "has no such part"
        choices = ", ".join(name for name, m in METHODS.items() if _is_open(m))
        raise ValueError(f"--subspace is a choice for {choices}: {choice.method} {adapts}")
    subspace = SUBSPACES[choice.subspace]
    if type(method.subspace) is type(subspace):
        return method
    return dataclasses.replace(method, subspace=subspace)


def _is_open(method: Any) -> bool:
    """Whether a method leaves open what adapts: whether its subspace is a field."""
    return any(field.name == "subspace" for field in dataclasses.fields(method))


def _own_fields(part: Any) -> list[tuple[dataclasses.Field[Any], str]]:
    """The fields of a part that are options, each with the name of its option."""
    cls = part if isinstance(part, type) else type(part)
    return [
        (f, _RENAMED.get((cls.__name__, f.name), f.name))
        for f in dataclasses.fields(cls)
        if f.name not in (*_PARTS, "method")
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
        hint = str if hints[field.name] == _NAMES else hints[field.name]
        kind = Annotated[hint, help_text]  # type: ignore[valid-type]
        default = field.default if part is cls else getattr(part, field.name)
        if hints[field.name] == _NAMES and isinstance(default, tuple):
            default = join_names(default)
        if default is dataclasses.MISSING:
            fields.insert(0, (name, kind))
        else:
            fields.append((name, kind, dataclasses.field(default=default)))
    if not fields:
        return None
    mirror = dataclasses.make_dataclass(cls.__name__, fields)
    mirror.__doc__ = _plain(doc.short_description)
    return mirror


def split_names(text: str) -> tuple[str, ...]:
    """Names with commas between them, as in a line of CSV.

    Spaces around them do not count, unless a name is in quotes: then those at their ends do.

    Raises:
        ValueError: it is no line of CSV.
    """
    try:
        (names,) = csv.reader([text], skipinitialspace=True, strict=True)
    except (ValueError, csv.Error) as error:
        raise ValueError(f"names must be a line of CSV, got {text!r}: {error}") from None
    return tuple(names) if '"' in text else tuple(name.strip() for name in names)


def join_names(names: Sequence[str]) -> str:
    """The inverse."""
    line = io.StringIO()
    spaced = any(name != name.strip() for name in names)
    quoting: Any = csv.QUOTE_ALL if spaced else csv.QUOTE_MINIMAL
    csv.writer(line, lineterminator="", quoting=quoting).writerow(names)
    return line.getvalue()


def _plain(text: str | None) -> str:
    """Documentation without line breaks and markup."""
    return " ".join((text or "").replace("``", "").replace("**", "").split())


def _build(part: Any, parsed: Any) -> Any:
    """The part with the values that were parsed for its mirror."""
    hints = get_type_hints(part if isinstance(part, type) else type(part))
    values = {field.name: getattr(parsed, name) for field, name in _own_fields(part)}
    for name, value in values.items():
        if hints[name] == _NAMES:
            values[name] = split_names(value)
    return part(**values) if isinstance(part, type) else dataclasses.replace(part, **values)
