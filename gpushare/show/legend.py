"""What the column heads of `status` and `jobs` mean: `gpushare status --legend`."""

from __future__ import annotations

from typing import Final

from gpushare.base.values import dataclass
from gpushare.show.result import Column, Result, Table

HEADS: Final = {
    "GPU": "The index of the GPU, as in nvidia-smi and -g.",
    "name": "The model of the GPU, or the name of an instance or a job.",
    "sharing": "How its programs share the GPU now: time-slicing, MPS, both, or MIG; exclusive or prohibited: not at all; lost: no answer.",
    "memory": "Device memory in use, of the total; of a job: of its limit.",
    "reserved": "Device memory that jobs of gpushare have reserved, used or not.",
    "util": "The part of the time in which some kernel ran. One small program can show 100 %.",
    "procs": "The number of processes on the GPU or the instance.",
    "time-slice": "The level of the GPU's time-slice: default, short, medium or long.",
    "compute mode": "Who may use the GPU: default (all), exclusive-process (one program or MPS), prohibited.",
    "MIG": "Whether the GPU is divided into instances.",
    "PCI bus id": "Where the GPU is plugged in; -g takes it.",
    "UUID": "The id of the GPU or MIG device; CUDA_VISIBLE_DEVICES and -g take it.",
    "GI": "The number of the GPU instance: a part of the GPU with memory and SMs of its own.",
    "CI": "The number of the compute instance: a set of SMs of a GPU instance, usually all of them.",
    "profile": "The size of an instance: 1g.10gb has one compute slice and 10 GB.",
    "SMs": "Streaming multiprocessors: the cores that run kernels.",
    "pid": "The process id.",
    "type": "C computes, G draws, M is a client of MPS; M+C is both.",
    "user": "Who owns the process.",
    "SM": "How much of the time its kernels ran, however few SMs they used; - for clients of MPS: the driver counts it for the server.",
    "age": "How long the process has been running.",
    "idle": "How long ago it last worked on the GPU.",
    "job": "The name that run or farm gave it; every command that takes a JOB takes it.",
    "role": "production: opportunistic jobs yield to it; plain: neither role.",
    "way": "How the job shares the GPU: time-slice, MPS or MIG, with its slice, thread limit or instance.",
    "paused": "How long it has been kept off the GPU (gpushare resume).",
    "container": "The container that it runs in.",
    "command": "The command line.",
    "started by": "Who started the MPS daemon: gpushare, gpushare run (ends with its last client), or others.",
    "status": "Whether the MPS daemon and its servers answer.",
    "clients": "The programs that are attached to the MPS daemon.",
    "threads": "The part of the SMs that a client of MPS may use, in percent.",
    "memory limit": "What a client of MPS, or a job, may allocate.",
    "priority": "Of a client of MPS: a hint to the hardware; low gives way.",
    "pipe directory": "Where clients find the MPS daemon (CUDA_MPS_PIPE_DIRECTORY).",
    "device": "The GPU or MIG device that an MPS daemon serves, or a job had.",
    "program": "The name of the program.",
    "server pid": "The process of the MPS server that the client uses.",
    "place": "The place in the line of jobs that wait for room, from 1.",
    "for": "How much memory a waiting job needs on each GPU; all: a GPU of its own.",
    "waits for": "The jobs before it in the line, and those that hold its GPUs.",
    "state": "running, waiting, paused, or of a swapped job: leaving, out, returning, lost.",
    "swapped": "What the job holds in host memory while it is out of the GPU.",
    "since": "How long it has been in this state.",
    "exit code": "That of its program (128 + N: signal N ended it); 1 if gpushare ended it at its --memory or --time; or why there is none: not started, gpushare killed.",
    "ran": "How long it ran.",
    "ended": "How long ago it ended.",
    "peak memory": "The most device memory that it held at once, on the first of its GPUs; of a farm: the most that one copy held.",
    "server": "The state of the servers of an MPS daemon: ACTIVE, FAULT; none yet: it starts with the first client.",
    "left": "How long the reservation still lasts.",
    "vGPU": "The number of a vGPU on a hypervisor.",
    "virtual machine": "The virtual machine that uses a vGPU.",
}


@dataclass(frozen=True, kw_only=True)
class Head:
    """A column head and its meaning."""

    head: str
    meaning: str


@dataclass(frozen=True, kw_only=True)
class LegendAnswer:
    """The answer of `status --legend`."""

    heads: tuple[Head, ...]


def legend_result() -> Result:
    heads = tuple(Head(head=head, meaning=meaning) for head, meaning in HEADS.items())
    columns = (Column("head", "head"), Column("meaning", "meaning", wrap=True))
    return Result(data=LegendAnswer(heads=heads), tables=(Table(name="heads", columns=columns, rows=heads),))
