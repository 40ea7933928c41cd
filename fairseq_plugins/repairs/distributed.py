"""Training in several processes: started by torchrun or by fairseq, with GPUs or without."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from fairseq.dataclass.configs import DistributedTrainingConfig
from fairseq.distributed import utils as distributed_utils
from fairseq.models import distributed_fairseq_model
from fairseq.tasks import TASK_REGISTRY, FairseqTask
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous
from torch.multiprocessing.spawn import spawn

from fairseq_plugins.common.replaced import replaced
from fairseq_plugins.repairs.refusals import refuse
from fairseq_plugins.repairs.wrapping import in_place_of, raises

SET_BY_TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")


def processes_of_torchrun() -> int:
    """How many processes torchrun has started, or what else sets its variables; 1 where nothing has."""
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in SET_BY_TORCHRUN) else 1


def options(**given: object) -> DictConfig:
    """Options of distributed training, for a probe."""
    return OmegaConf.create({**vars(DistributedTrainingConfig()), "tpu": False, **given})


def overlooks_torchrun(infer: Callable[..., None]) -> bool:
    """Probe: whether a process that torchrun has started takes itself for the only one."""
    training = options(distributed_world_size=1)
    variables = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "RANK": "0", "WORLD_SIZE": "2"}
    with replaced(os, "environ", variables):
        failed = raises(ZeroDivisionError, infer, training)
    return failed or training.distributed_init_method is None


def follow_torchrun() -> None:
    """fairseq asks for torchrun's variables only where a machine has several GPUs, and fails where it has none.

    With one GPU in each machine all processes would train alone, and write over each other's checkpoints.
    """
    infer = distributed_utils.infer_init_method
    if not overlooks_torchrun(infer):
        return

    @in_place_of(distributed_utils, "infer_init_method")
    def infer_init_method(cfg: Any, force_distributed: bool = False) -> None:
        decided = cfg.distributed_init_method is not None or cfg.tpu or cfg.pipeline_model_parallel
        if decided or processes_of_torchrun() == 1:
            infer(cfg, force_distributed)
            return
        cfg.distributed_init_method = meeting_place()
        cfg.distributed_world_size = processes_of_torchrun()
        cfg.distributed_rank = int(os.environ["RANK"])
        cfg.device_id = int(os.environ.get("LOCAL_RANK", cfg.distributed_rank)) % max(1, torch.cuda.device_count())
        cfg.distributed_no_spawn = True


def meeting_place() -> str:
    """How the processes of torchrun find each other.

    After ``--max-restarts`` has started them again, torch gives them the addresses of those that have ended, if
    torchrun keeps the addresses (``--standalone``).  Each start has its own addresses here; only torchrun on one
    machine counts the starts in the same way for all processes.
    """
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ.get("GROUP_WORLD_SIZE") == "1"
    if not kept:
        return "env://"

    def meet(url: str, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        for store, rank, processes in rendezvous(f"env{url.removeprefix('torchrun')}", **kwargs):
            yield PrefixStore(f"start {os.environ['TORCHELASTIC_RESTART_COUNT']}", store), rank, processes

    with contextlib.suppress(RuntimeError):  # it is registered already
        register_rendezvous_handler("torchrun", meet)
    return "torchrun://"


def join_the_others_under_hydra() -> None:
    """``fairseq-hydra-train`` decides how many processes there are before it imports the plugin.

    Where it has overlooked torchrun's, which is the probe, training begins by joining them.  Its options are checked
    there too: no parser has read them.
    """
    train: Any = sys.modules.get("fairseq_cli.train")
    if train is None:
        return
    add = train.add_defaults

    @in_place_of(train, "add_defaults")
    def add_defaults(cfg: Any) -> None:
        add(cfg)
        refuse("train", cfg)
        if processes_of_torchrun() > 1 and not torch.distributed.is_initialized():
            distributed_utils.call_main(cfg, lambda _: None)


def wants_a_gpu_for_each(infer: Callable[..., None]) -> bool:
    """Probe: whether there cannot be more processes than GPUs."""
    with replaced(os, "environ", {}):
        return raises(AssertionError, infer, options(distributed_world_size=max(2, torch.cuda.device_count() + 1)))


def check_backends(training: Any) -> None:
    """Take the backend that processors have.

    Raises:
        ValueError: models cannot be wrapped that way without GPUs.
    """
    if training.ddp_backend in ("fully_sharded", "slowmo"):
        raise ValueError(f"--ddp-backend {training.ddp_backend} takes GPUs; without, take pytorch_ddp or legacy_ddp")
    if training.distributed_backend == "nccl":
        training.distributed_backend = "gloo"


def train_on_processors() -> None:
    """``--distributed-world-size`` starts a process for each GPU and none without, and communicates through GPUs."""
    call = distributed_utils.call_main
    if not wants_a_gpu_for_each(distributed_utils.infer_init_method):
        return

    @in_place_of(distributed_utils, "call_main")
    def call_main(cfg: Any, main: Callable[..., None], **kwargs: Any) -> None:
        training, torchrun = cfg.distributed_training, processes_of_torchrun() > 1
        has_gpus = cfg.common.tpu or (torch.cuda.is_available() and not cfg.common.cpu)
        if has_gpus or (training.distributed_world_size == 1 and not torchrun):
            call(cfg, main, **kwargs)
            return
        check_backends(training)
        if training.distributed_no_spawn or torchrun or "SLURM_NTASKS" in os.environ:
            call(cfg, main, **kwargs)
            return
        if training.distributed_init_method is not None:
            raise ValueError(
                "without GPUs --distributed-init-method goes with --distributed-no-spawn, and each process is started "
                "with its own --distributed-rank; without it, all are started on this machine"
            )
        with socket.create_server(("localhost", 0)) as free:
            training.distributed_init_method = f"tcp://localhost:{free.getsockname()[1]}"
        training.distributed_rank = None  # each process gets its own
        arguments = (main, cfg, {**kwargs, "start_rank": 0})
        spawn(distributed_utils.distributed_main, arguments, training.distributed_world_size)


def gather_on_processors() -> None:
    """fairseq-validate, and what has logs that cannot be summed, gathers by way of a GPU's memory.

    The probe is of the code: to ask it takes several processes.
    """
    gather = distributed_utils.all_gather_list
    if "cuda" not in gather.__code__.co_names:
        return

    @in_place_of(distributed_utils, "all_gather_list")
    def all_gather_list(data: Any, group: Any = None, max_size: int = 16384) -> list[Any]:
        if torch.cuda.is_available():
            return gather(data, group, max_size)
        group = distributed_utils.get_global_group() if group is None else group
        found: list[Any] = [None] * distributed_utils.get_world_size(group)
        torch.distributed.all_gather_object(found, data, group=group)
        return found


def validates_nothing(step: Callable[..., Any]) -> bool:
    """Probe: whether a criterion is asked for the loss of no sentences."""
    asked = []

    def criterion(*_: object) -> tuple[int, int, dict[str, Any]]:
        asked.append(True)
        return 0, 0, {}

    step(None, {}, nn.Identity(), criterion)
    return bool(asked)


def validate_what_there_is() -> None:
    """fairseq-validate gives all processes equally many batches, some of them empty, on which every criterion fails.

    In training, fairseq itself puts another batch in their place.
    """
    if not validates_nothing(FairseqTask.valid_step):
        return
    for owner in {FairseqTask, *(task for task in TASK_REGISTRY.values() if "valid_step" in vars(task))}:

        @in_place_of(owner, "valid_step")
        def valid_step(
            self: Any, sample: Any, *args: Any, step: Callable[..., Any] = owner.valid_step, **kwargs: Any
        ) -> tuple[Any, Any, dict[str, Any]]:
            is_empty = sample is None or sample in ({}, [])
            return (0, 0, {}) if is_empty else step(self, sample, *args, **kwargs)


def wants_a_gpu_for_a_model(wrap: Callable[..., nn.Module]) -> bool:
    """Probe: whether a model on the processor is wrapped as if it were on a GPU."""
    model = nn.Linear(1, 1)
    devices = []

    def wrapper(module: nn.Module, device_ids: Any = None, **_: object) -> nn.Module:
        devices.append(device_ids)
        return nn.ModuleDict({"module": module})

    with replaced(distributed_fairseq_model, "DistributedDataParallel", wrapper):
        wrap(options(ddp_backend="pytorch_ddp"), model, None, torch.device("cpu"))
    return devices != [None]


def wrap_models_on_processors() -> None:
    """``--ddp-backend pytorch_ddp``, fairseq's default, tells torch a GPU also for a model that is on none."""
    wrapper = distributed_fairseq_model.DistributedDataParallel
    if not wants_a_gpu_for_a_model(distributed_fairseq_model.DistributedFairseqModel):
        return

    def wrap(module: nn.Module, **options: Any) -> nn.Module:
        if next(module.parameters()).device.type == "cpu":
            options |= {"device_ids": None, "output_device": None}
        return wrapper(module, **options)

    distributed_fairseq_model.DistributedDataParallel = wrap
