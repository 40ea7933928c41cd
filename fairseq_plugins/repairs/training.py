"""Training in several processes, started by torchrun or by fairseq, and training on CPUs."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import torch
from fairseq import utils
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.distributed import utils as distributed_utils
from fairseq.models import FairseqEncoderDecoderModel, distributed_fairseq_model
from fairseq.optim import FP16Optimizer
from fairseq.optim.adam import Adam
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous
from torch.multiprocessing.spawn import spawn

from fairseq_plugins.common.model import IncrementalDecoder
from fairseq_plugins.common.output_layer import has_plain_softmax
from fairseq_plugins.cpu.dropout_and_loss import label_smoothed_nll_loss
from fairseq_plugins.repairs.refusals import refuse
from fairseq_plugins.repairs.wrapping import replaced, wrap

SET_BY_TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")


def processes_of_torchrun() -> int:
    """Return the number of processes that torchrun or a similar launcher has started; 1 without a launcher."""
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in SET_BY_TORCHRUN) else 1


@wrap(distributed_utils, "infer_init_method")
def follow_torchrun(infer: Any, cfg: Any, force_distributed: bool = False) -> None:
    """Read torchrun's environment variables on every machine; fairseq does so only on machines with several GPUs.

    With one GPU per machine, each process of fairseq trains alone and overwrites the other processes' checkpoints.
    Users must set ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`` if they use several machines with ``--rdzv-backend c10d``.
    """
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
    """Return the rendezvous address of the processes that torchrun started.

    With ``--standalone``, torchrun keeps its key-value store when it restarts processes (``--max-restarts``).  The new
    processes would find the addresses of the ended processes in torchrun's store, so the store's keys get a new prefix
    at each start.  If several machines train together, the keys get no prefix, because the machines may have different
    restart counts.
    """
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ.get("GROUP_WORLD_SIZE") == "1"
    if not kept:
        return "env://"

    def meet(url: str, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        for store, rank, processes in rendezvous(f"env{url.removeprefix('torchrun')}", **kwargs):
            yield PrefixStore(f"start {os.environ['TORCHELASTIC_RESTART_COUNT']}", store), rank, processes

    with contextlib.suppress(RuntimeError):  # an earlier call has registered the handler
        register_rendezvous_handler("torchrun", meet)
    return "torchrun://"


@wrap("train", "add_defaults")
def join_processes_under_hydra(add: Any, cfg: Any) -> None:
    """Check the options of ``fairseq-hydra-train``, and connect torchrun's processes when training begins.

    ``fairseq-hydra-train`` counts processes before it imports the plugin, and no parser checks the command's options.
    Without GPUs, users must omit ``distributed_world_size`` and, with fairseq 0.12.2, set
    ``distributed_backend: gloo``.
    """
    add(cfg)
    refuse("train", cfg)
    if processes_of_torchrun() > 1 and not torch.distributed.is_initialized():
        distributed_utils.call_main(cfg, lambda _: None)


@wrap(distributed_utils, "call_main")
def train_on_cpus(call: Any, cfg: Any, main: Callable[..., None], **kwargs: Any) -> None:
    """Start the processes of ``--distributed-world-size`` on CPUs if no GPU is used, and connect them by gloo.

    fairseq starts processes only on GPUs.
    """
    training, torchrun = cfg.distributed_training, processes_of_torchrun() > 1
    has_gpus = cfg.common.tpu or (torch.cuda.is_available() and not cfg.common.cpu)
    if has_gpus or (training.distributed_world_size == 1 and not torchrun):
        call(cfg, main, **kwargs)
        return
    if training.distributed_backend == "nccl":
        training.distributed_backend = "gloo"
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


@wrap(distributed_utils, "all_gather_list")
def gather_on_cpus(gather: Any, data: Any, group: Any = None, max_size: int = 16384) -> list[Any]:
    """Without GPUs, use gloo to gather logs that cannot be summed; fairseq gathers these logs through GPU memory."""
    if torch.cuda.is_available():
        return list(gather(data, group, max_size))
    group = distributed_utils.get_global_group() if group is None else group
    found: list[Any] = [None] * distributed_utils.get_world_size(group)
    torch.distributed.all_gather_object(found, data, group=group)
    return found


@wrap(distributed_fairseq_model, "DistributedDataParallel")
def wrap_models_on_cpus(wrapper: Any, module: nn.Module, **options: Any) -> Any:
    """Pass no GPU to DistributedDataParallel if the model is on the CPU; fairseq passes a GPU by default."""
    if next(module.parameters()).device.type == "cpu":
        options |= {"device_ids": None, "output_device": None}
    return wrapper(module, **options)


@wrap(utils, "clip_grad_norm_")
def clip_gradients_on_their_device(clip: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
    """With ``--cpu``, keep the gradients' norm on the CPU; fairseq moves the norm to a GPU, and clipping fails."""
    params = [params] if isinstance(params, Tensor) else list(params)
    is_on_gpu = any(getattr(each, "is_cuda", False) for each in params)  # some parameters may be None
    no_gpu = replaced(torch.cuda, "is_available", lambda: False)
    with contextlib.nullcontext() if is_on_gpu else no_gpu:
        return clip(params, *args, **kwargs)


@wrap(FP16Optimizer, "build_optimizer")
def flatten_on_gpus_only(build: Any, cls: Any, cfg: Any, params: Any, **kwargs: Any) -> Any:
    """Set ``--fp16-no-flatten-grads`` on a CPU; fairseq's flat vector of gradients in half precision needs a GPU."""
    if not any(each.is_cuda for each in params):
        cfg.common.fp16_no_flatten_grads = True
    return build(cls, cfg, params, **kwargs)


@wrap(Adam, "step")
def update_in_one_pass(step: Any, self: Any, closure: Any = None) -> Any:
    """Run the steps of ``--optimizer adam`` on a CPU with torch's fused kernel.

    fairseq reads all parameters and moments eleven times in each step.  The optimizer's state, its checkpoints and its
    formula are unchanged, and results differ from fairseq's only by rounding.
    """
    trained = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
    amsgrad = any(group["amsgrad"] for group in self.param_groups)
    if closure is not None or amsgrad or not all(map(is_plain, trained)):
        return step(self, closure)
    for group in self.param_groups:
        update(self, group)
    return None


def is_plain(parameter: Tensor) -> bool:
    """Return whether a parameter and its gradient are contiguous float32 tensors on a CPU."""
    pair: Any = (parameter, parameter.grad)
    plain = ("cpu", torch.float32, torch.strided)
    return all((each.device.type, each.dtype, each.layout) == plain and each.is_contiguous() for each in pair)


@torch.no_grad()
def update(optimizer: Adam, group: dict[str, Any]) -> None:
    """Update all parameters in a group that have gradients; the update is the same as that of fairseq's Adam."""
    trained = [each for each in group["params"] if each.grad is not None]
    for parameter in trained:
        state = optimizer.state[parameter]
        if not state:
            state["step"] = 0
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = state[name].to(parameter).contiguous()
    beta1, beta2 = group["betas"]
    # fairseq adds epsilon to the square root of the biased second moment; torch adds epsilon to the square root of the
    # unbiased moment.  Dividing epsilon by the root of the bias correction makes torch's step equal to fairseq's.
    ordered = sorted(trained, key=lambda each: optimizer.state[each]["step"])
    for number, same in itertools.groupby(ordered, key=lambda each: optimizer.state[each]["step"]):
        parameters = list(same)
        states = [optimizer.state[each] for each in parameters]
        torch._fused_adamw_(
            parameters,
            [each.grad for each in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [torch.tensor(float(number))] * len(parameters),
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"] / math.sqrt(1 - beta2**number),
            amsgrad=False,
            maximize=False,
        )


def has_plain_forward(model: FairseqEncoderDecoderModel) -> bool:
    """Return whether logits come from this plugin's ``forward`` and a linear map, so that nothing else holds them."""
    decoder = type(model.decoder)
    return (
        type(model).forward is FairseqEncoderDecoderModel.forward
        and getattr(decoder, "forward", None) is IncrementalDecoder.forward
        and getattr(decoder, "output_layer", None) is IncrementalDecoder.output_layer
    )


@wrap(LabelSmoothedCrossEntropyCriterion, "compute_loss")
def smooth_in_one_pass(
    compute: Any, self: Any, model: Any, net_output: Any, sample: dict[str, Any], reduce: bool = True
) -> Any:
    """Compute ``--criterion label_smoothed_cross_entropy`` on a CPU without fairseq's five copies of the logits.

    At each update, fairseq allocates new memory for its copies, and the operating system first fills this memory with
    zeros.  The formula is unchanged, and results differ from fairseq's only by rounding.

    If nothing else reads the logits, their gradient overwrites them, and the next batch's logits may reuse their
    memory.  This holds for fairseq's criterion, and for subclasses that themselves set ``forgets_logits = True``, with
    models that inherit this plugin's ``forward``.
    """
    # The model without its wrapper for distributed training.
    own = getattr(model.get_normalized_probs, "__self__", None)
    if (
        reduce
        and not self.ignore_prefix_size
        and isinstance(own, FairseqEncoderDecoderModel)
        and has_plain_softmax(own)
        and net_output[0].device.type == "cpu"
    ):
        target, logits = model.get_targets(sample, net_output).flatten(), net_output[0].flatten(0, -2)
        forgets = vars(type(self)).get("forgets_logits", type(self) is LabelSmoothedCrossEntropyCriterion)
        overwrite = forgets and not self.report_accuracy and has_plain_forward(own)
        return label_smoothed_nll_loss(logits, target, self.eps, self.padding_idx, overwrite)
    return compute(self, model, net_output, sample, reduce)
