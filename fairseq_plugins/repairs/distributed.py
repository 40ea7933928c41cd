"""Distributed training on GPUs or CPUs, started by torchrun or by fairseq, and half precision on CPUs."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from fairseq import utils
from fairseq.distributed import utils as distributed_utils
from fairseq.models import distributed_fairseq_model
from fairseq.optim import FP16Optimizer
from fairseq.tasks import TASK_REGISTRY, FairseqTask
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous
from torch.multiprocessing.spawn import spawn

from fairseq_plugins.repairs.refusals import refuse
from fairseq_plugins.repairs.wrapping import mentions, replaced, wrap

SET_BY_TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")


def processes_of_torchrun() -> int:
    """Return the number of processes that torchrun or a similar launcher has started; 1 without a launcher."""
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in SET_BY_TORCHRUN) else 1


def follow_torchrun() -> None:
    """Read torchrun's environment variables on every machine; fairseq reads them only on a machine with several GPUs.

    With one GPU per machine, each process of fairseq trains alone and overwrites the other processes' checkpoints.
    Users must set ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`` if they use several machines with ``--rdzv-backend c10d``.
    No probe is needed: with several GPUs the result is the same as fairseq's.
    """
    infer = distributed_utils.infer_init_method

    @wrap(distributed_utils, "infer_init_method")
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
    """Return the address where the processes of torchrun meet.

    With ``--standalone``, torchrun keeps its store when it restarts processes (``--max-restarts``), and torch finds the
    addresses of the ended processes there.  This function therefore gives the store's keys a new prefix at each start.
    The prefix is used on one machine only, because several machines may count starts differently.
    """
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ.get("GROUP_WORLD_SIZE") == "1"
    if not kept:
        return "env://"

    def meet(url: str, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        for store, rank, processes in rendezvous(f"env{url.removeprefix('torchrun')}", **kwargs):
            yield PrefixStore(f"start {os.environ['TORCHELASTIC_RESTART_COUNT']}", store), rank, processes

    with contextlib.suppress(RuntimeError):  # the handler is registered already
        register_rendezvous_handler("torchrun", meet)
    return "torchrun://"


def join_processes_under_hydra() -> None:
    """Check the options of ``fairseq-hydra-train``, and join the processes of torchrun when training begins.

    This command counts processes before it imports the plugin, and has no parser that checks its options.  Without
    GPUs, users must omit ``distributed_world_size`` and, with fairseq 0.12.2, set ``distributed_backend: gloo``.  The
    probe is whether the process has already joined.
    """
    train: Any = sys.modules.get("fairseq_cli.train")
    if train is None:
        return
    add = train.add_defaults

    @wrap(train, "add_defaults")
    def add_defaults(cfg: Any) -> None:
        add(cfg)
        refuse("train", cfg)
        if processes_of_torchrun() > 1 and not torch.distributed.is_initialized():
            distributed_utils.call_main(cfg, lambda _: None)


def check_backends(training: Any) -> None:
    """Choose the backend for CPUs.

    Raises:
        ValueError: this ``--ddp-backend`` needs GPUs.
    """
    if training.ddp_backend in ("fully_sharded", "slowmo"):
        raise ValueError(f"--ddp-backend {training.ddp_backend} needs GPUs; use pytorch_ddp or legacy_ddp on CPUs")
    if training.distributed_backend == "nccl":
        training.distributed_backend = "gloo"


def train_on_cpus() -> None:
    """Start the processes of ``--distributed-world-size`` without GPUs, and connect them by gloo.

    fairseq starts processes only on GPUs.  No probe is needed: with GPUs fairseq starts them.
    """
    call = distributed_utils.call_main

    @wrap(distributed_utils, "call_main")
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
                "--distributed-init-method without GPUs needs --distributed-no-spawn and a --distributed-rank for each "
                "process; leave it out to start all processes on this machine"
            )
        with socket.create_server(("localhost", 0)) as free:
            training.distributed_init_method = f"tcp://localhost:{free.getsockname()[1]}"
        training.distributed_rank = None  # each process gets its own rank
        arguments = (main, cfg, {**kwargs, "start_rank": 0})
        spawn(distributed_utils.distributed_main, arguments, training.distributed_world_size)


def gather_on_cpus() -> None:
    """Without GPUs, gather logs that cannot be summed through gloo; fairseq gathers them through GPU memory.

    The probe reads the code, because a call would need several processes.
    """
    gather = distributed_utils.all_gather_list
    if not mentions(gather, "cuda"):
        return

    @wrap(distributed_utils, "all_gather_list")
    def all_gather_list(data: Any, group: Any = None, max_size: int = 16384) -> list[Any]:
        if torch.cuda.is_available():
            return gather(data, group, max_size)
        group = distributed_utils.get_global_group() if group is None else group
        found: list[Any] = [None] * distributed_utils.get_world_size(group)
        torch.distributed.all_gather_object(found, data, group=group)
        return found


def skip_empty_validation_batches() -> None:
    """Return loss 0 for an empty batch in validation; every criterion crashes at an empty batch.

    If batches cannot be divided evenly, some processes of fairseq-validate get an empty one.  fairseq itself replaces
    empty batches in training.  No probe is needed: a batch with sentences is validated as before.
    """
    for owner in {FairseqTask, *(task for task in TASK_REGISTRY.values() if "valid_step" in vars(task))}:

        @wrap(owner, "valid_step")
        def valid_step(
            self: Any, sample: Any, *args: Any, step: Callable[..., Any] = owner.valid_step, **kwargs: Any
        ) -> tuple[Any, Any, dict[str, Any]]:
            is_empty = sample is None or sample in ({}, [])
            return (0, 0, {}) if is_empty else step(self, sample, *args, **kwargs)


def wrap_models_on_cpus() -> None:
    """Pass no GPU to DistributedDataParallel for a model on the CPU; fairseq passes one by default.

    No probe is needed: models on GPUs are wrapped as before.
    """
    wrapper = distributed_fairseq_model.DistributedDataParallel

    def make(module: nn.Module, **options: Any) -> nn.Module:
        if next(module.parameters()).device.type == "cpu":
            options |= {"device_ids": None, "output_device": None}
        return wrapper(module, **options)

    distributed_fairseq_model.DistributedDataParallel = make


def clip_gradients_on_their_device() -> None:
    """Keep the norm of the gradients on the CPU with ``--cpu``; fairseq moves it to a GPU, and clipping then fails.

    No probe is needed: gradients on a GPU, and gradients on a machine without GPUs, are clipped as before.
    """
    clip = utils.clip_grad_norm_

    @wrap(utils, "clip_grad_norm_")
    def clip_grad_norm_(params: Any, *args: Any, **kwargs: Any) -> Tensor:
        params = [params] if isinstance(params, Tensor) else list(params)
        is_on_gpu = any(getattr(each, "is_cuda", False) for each in params)  # some may be None
        no_gpu = replaced(torch.cuda, "is_available", lambda: False)
        with contextlib.nullcontext() if is_on_gpu else no_gpu:
            return clip(params, *args, **kwargs)


def flatten_on_gpus_only() -> None:
    """Set ``--fp16-no-flatten-grads`` on a CPU; fairseq's flat vector of gradients in half precision needs a GPU."""
    if not mentions(FP16Optimizer.build_fp32_params, "current_device"):  # the probe: whether flattening needs a GPU
        return
    build: Any = FP16Optimizer.build_optimizer.__func__

    @functools.wraps(build)
    def build_optimizer(cls: Any, cfg: Any, params: Any, **kwargs: Any) -> Any:
        if not any(each.is_cuda for each in params):
            cfg.common.fp16_no_flatten_grads = True
        return build(cls, cfg, params, **kwargs)

    FP16Optimizer.build_optimizer = classmethod(build_optimizer)  # type: ignore[arg-type]
