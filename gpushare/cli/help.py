"""``--help``: options in groups, the common ones once, and examples. Loaded only when help is shown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

COMMON: Final = frozenset(("--host", "--output", "--quiet", "--verbose", "--debug"))
COMMON_LINE: Final = "Common options: --host -o -q -v --debug (gpushare --help)"

# The groups of a command with many options; `--help` leaves those with a + to `--help-all` and to the manual page.
# Options that no group names are listed last, as "Options".
GROUPS: Final[Mapping[str, Mapping[str, str]]] = {
    "advise": {
        "What is asked": "processes memory users isolation latency saturating pattern root",
        "More about the work": "like +gpus +sms +bandwidth-bound +io-bound +needs +command +one-application +cooperating +code +running",
        "Users and protection": "+trusted +groups",
        "Production and another job": "production opportunistic +role +production-saturating",
        "Instead of options": "file +live +from",
        "The answer": "gpu +consolidate +destroy +way apply no-input",
        "Measure": "measure +metric +lower-is-better +for +repeat",
    },
    "run": {
        "Share": "gpu gpus +bind mig +create threads memory over priority slice +weight +strict container",
        "Waiting for room": "wait timeout +time requeue +restart-on swap +movable",
        "Roles": "production +metric +lower-is-better opportunistic for yield keep",
        "Options": "+grace",
    },
    "bench": {
        "What is measured": "copies ways repeat gpu for +timeout",
        "Numbers that CMD prints": "metric +lower-is-better +latency",
        "The built-in workload": "+size +cpu +copy +footprint",
        "Results": "to +compare +plot",
    },
    "tune": {
        "The two jobs": "production opportunistic gpu name",
        "Goal": "keep p99 metric +opportunistic-metric +latency",
        "Search": "+copies +caps budget +window +timeout +plot",
    },
}

# (what it does, the command without "gpushare"), by command.
EXAMPLES: Final[Mapping[str, tuple[tuple[str, str], ...]]] = {
    "status": (
        ("Look again every two seconds", "status -w"),
        ("GPU utilization for a script", "status -g 0 -o json"),
    ),
    "run": (
        ("In the background, when a GPU has room", "run -d --wait -g any --memory 20G -- python3 train.py"),
        ("Next to the production job `serve`", "run --opportunistic --for serve -- python3 batch.py"),
        ("At most a quarter of the SMs and 4 GiB", "run --threads 25 --memory 4G -- python3 train.py"),
        ("In a MIG instance of its own", "run --mig 1g -- python3 train.py"),
        ("A notebook that gives its memory back", "run --swap idle=10m -- jupyter lab"),
    ),
    "farm": (
        ("Eight trainings with their numbers as seeds", "farm --copies 8 --logs logs -- python3 train.py --seed {}"),
        ("One for each line, on all GPUs", "farm -g any --each inputs.txt --memory 10G -- python3 infer.py {}"),
    ),
    "move": (
        ("To GPU 1, when it has room", "move train -g 1 --wait"),
        ("All jobs off a GPU", "move --off 0"),
    ),
    "reserve": (
        ("GPU 1 for two hours", "reserve -g 1 --for 2h"),
        ("Give it back", "reserve -g 1 --end"),
    ),
    "swap in": (("When the GPU has room", "swap in train --wait"),),
    "timeslice set": (
        ("A short slice for a training, next to a server", "timeslice set 500us train"),
        ("Long slices on one GPU", "timeslice set long -g 0"),
    ),
    "mps start": (
        ("Half of the SMs and 8 GiB for each client", "mps start -g 0 --threads 50 --memory 8G"),
        ("Another limit on each GPU", "mps start -g 0,1 --threads 0=25,1=50"),
    ),
    "mps stop": (
        ("Wait up to a minute for the clients, then end them", "mps stop -g 0 --drain 60s"),
        ("At once, with all clients", "mps stop -g 0 --force"),
    ),
    "mps set": (("Lower limits for clients that start from now on", "mps set -g 0 --threads 25 --memory 4G"),),
    "mps logs": (("What the log means", "mps logs -g 0 | gpushare explain -"),),
    "mps env": (("Let programs of this shell join", 'eval "$(gpushare mps env -g 0 --threads 25)"'),),
    "mig fits": (
        ("On GPU 0 as it is now", "mig fits 3g.71gb '1g.18gb*2' -g 0"),
        ("By need instead of profile", "mig fits --memory 20G --sm 30"),
    ),
    "mig plan": (
        ("On a GPU that is not here", "mig plan '3g*2' --model h100-sxm"),
        ("If idle instances may go", "mig plan 7g -g 0 --may-destroy"),
    ),
    "mig create": (
        ("Two instances with names", "mig create '1g.18gb*2' -g 0 --name alice"),
        ("By need instead of profile", "mig create --memory 30G --name carl"),
    ),
    "mig destroy": (
        ("By name", "mig destroy alice"),
        ("One with running programs", "mig destroy alice --evict alice"),
    ),
    "mig apply": (
        ("Exactly this layout, after a look at the plan", "mig apply -g 0 '3g.71gb*2' -n"),
        ("A layout of a mig-parted file", "mig apply -f parted.yaml -c all-balanced"),
    ),
    "mig disable": (("With the idle instances", "mig disable -g 0 --destroy"),),
    "mig check": (("Exit code 7 if the layout differs", "mig check -g 0 '3g.71gb*2'"),),
    "advise": (
        ("Four processes of one user", "advise --processes 4 --memory 6G --no-saturating"),
        ("Notebooks of five people", "advise --like jupyter --processes 5 --users different"),
        ("What runs now", "advise -g 0 --live"),
        ("Measure first", "advise --measure --processes 4 --metric 'rate=([0-9.]+)' --for 5s -- python3 job.py"),
    ),
    "compare": (("Why a cell says what it says", "compare --why memory_protection mps"),),
    "bench": (
        ("1, 2 and 4 copies in each way", "bench --copies 1,2,4 -- python3 job.py"),
        ("By a number that it prints", "bench --metric 'rate=([0-9.]+)' --for 10s -- python3 job.py"),
        ("Keep the result", "bench --copies 4 --to bench.json -- python3 job.py"),
    ),
    "tune": (
        (
            "Production keeps 95 % of its rate",
            "tune --production 'python3 serve.py' --opportunistic 'python3 batch.py' --keep 95% --metric 'rate=([0-9.]+)'",
        ),
        ("For `gpushare run --opportunistic --for serve`", "tune --production CMD --opportunistic CMD --name serve"),
    ),
    "observe": (
        ("For an hour, into a file", "observe --for 1h --to hour.jsonl"),
        ("Look at a recording", "observe --from hour.jsonl"),
    ),
    "savings": (
        ("From numbers", "savings --gpus 16 --load 20% --price 2.50"),
        ("From a recording", "savings --from week.jsonl --price 2.50"),
    ),
    "apply": (
        ("Preview", "apply gpushare.yaml -n"),
        ("Wait up to a minute for programs to leave the GPUs", "apply gpushare.yaml --wait 60s"),
    ),
    "export k8s": (("Four replicas of each GPU, into files", "export k8s --replicas 4 --to k8s"),),
    "export dra": (("For Kubernetes 1.34", "export dra --kubernetes 1.34 --to dra"),),
    "export karpenter": (("Up to four nodes", "export karpenter --replicas 4 --max-nodes 4"),),
    "export slurm": (("This node, into files", "export slurm --node gpu01 --to slurm"),),
    "export mig-parted": (("The layout as it is", "export mig-parted --name balanced > parted.yaml"),),
    "export cdi": (("Into files", "export cdi --to cdi"),),
    "export docker": (("A share of GPU 0", "export docker -g 0"),),
    "export ecs": (("A share of GPU 0", "export ecs -g 0 --image pytorch/pytorch --name train"),),
    "export compose": (("A service", "export compose -g 0 --image pytorch/pytorch"),),
    "export systemd": (("Set up the host at each boot", "export systemd --at-boot /etc/gpushare.yaml --to units"),),
    "export prometheus": (("Alerts", "export prometheus --rules > gpushare.rules.yaml"),),
    "sim add": (
        ("A client of MPS with 2 GiB", "--host sim:h200 sim add --mps --memory 2G"),
        ("A program in a MIG instance, after sim mig 3g.71gb", "--host sim:h200 sim add --mig 1"),
    ),
    "sim fault": (("GPU 1 is lost", "--host sim:2xh200 sim fault lost -g 1"),),
    "sim vgpu": (("A vGPU of a machine", "--host sim:h200 sim vgpu 'NVIDIA H200-35C' --memory 35G --vm train"),),
}


def typed_line(command: str) -> str:
    return command if command.startswith("eval ") else f"gpushare {command}"


def path_of(ctx: Any) -> str:
    """Return the words of the command; empty for the program itself."""
    return " ".join(str(ctx.command_path).split()[1:])


ALL: Final = "gpushare.help.all"


def is_short(ctx: Any) -> bool:
    """Return whether some of the help is left to ``--help-all``."""
    return path_of(ctx) in GROUPS and not ctx.meta.get(ALL)


def write_options(params: Iterable[Any], ctx: Any, formatter: Any) -> None:
    """Write arguments and options in groups. The common options are one line, except in the help of the program."""
    path = path_of(ctx)
    groups = {title: names.split() for title, names in GROUPS.get(path, {}).items()}
    more = {f"--{name[1:]}" for names in groups.values() for name in names if name.startswith("+")}
    left_out = more if is_short(ctx) else set()
    # The short help of `advise` has few options: only its first group has a title of its own.
    titles = list(groups)[:1] if path == "advise" and left_out else list(groups)
    title_of = {f"--{name.removeprefix('+')}": title for title in titles for name in groups[title]}
    common_title = "Common options, before or after the command"
    if path:
        left_out |= {*COMMON, "--help"}
    else:
        title_of |= dict.fromkeys(COMMON, common_title)
    sections: dict[str, list[tuple[str, str]]]
    sections = {title: [] for title in ("Arguments", *titles, "Options", common_title)}
    for param in params:
        record = param.get_help_record(ctx)
        if record is not None and left_out.isdisjoint(param.opts):
            usual_title = "Arguments" if param.param_type_name == "argument" else "Options"
            sections[next((title_of[name] for name in param.opts if name in title_of), usual_title)].append(record)
    for title, records in sections.items():
        if records:
            with formatter.section(title):
                formatter.write_dl(records)
    if path:
        formatter.write_paragraph()
        formatter.write(f"{COMMON_LINE}\n")


def write_examples(ctx: Any, formatter: Any) -> None:
    """Write the examples of a command as they are typed, never wrapped, so that they can be copied."""
    path = path_of(ctx)
    if path not in EXAMPLES:
        return
    formatter.write_paragraph()
    formatter.write("Examples:\n")
    examples = EXAMPLES[path][:1] if is_short(ctx) else EXAMPLES[path]
    for purpose, command in examples:
        formatter.write(f"  {purpose}:\n    {typed_line(command)}\n")
