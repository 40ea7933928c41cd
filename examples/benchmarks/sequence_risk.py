#!/usr/bin/env python3
"""Time forward and backward passes of sequence_risk, of its plain implementation, and of cross-entropy.

``sequence_risk.py CHECKPOINT DATA_BIN`` reads a trained model and its training data.  The plain implementation searches
with fairseq's generator, scores all hypotheses in one batch with a copy of the source for each hypothesis, and computes
costs by sacreBLEU.  The three contestants take turns on the same batches, in training mode.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from fairseq import checkpoint_utils, utils
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion, label_smoothed_nll_loss
from fairseq.data import data_utils
from fairseq.sequence_generator import SequenceGenerator
from sacrebleu import BLEU, CHRF
from torch import Tensor

import fairseq_plugins
from fairseq_plugins.sequence_risk.config import SequenceRiskConfig
from fairseq_plugins.sequence_risk.criterion import SequenceRisk

fairseq_plugins.install()

ALPHA, SCALE, EPSILON = 0.2, 4.0, 0.1
METRICS = {"bleu": partial(BLEU, smooth_method="add-k", smooth_value=1, tokenize="none"), "chrf": CHRF}


def plain(task: Any, cost: str, count: int, model: Any, sample: dict[str, Any]) -> Tensor:
    """Compute the loss of `SequenceRisk` by the plain implementation, summed over sentences."""
    dictionary, inputs, training = task.target_dictionary, sample["net_input"], model.training
    model.eval()
    found = SequenceGenerator([model], dictionary, beam_size=count, max_len_a=1.5, max_len_b=5).generate(
        [model], sample
    )
    model.train(training)
    metric: Any = METRICS[cost]()
    costs = []
    for target, hypotheses in zip(sample["target"], found, strict=True):
        reference = dictionary.string(target[target != dictionary.pad()], "subword_nmt", escape_unk=True)
        for hypothesis in hypotheses:
            text = dictionary.string(hypothesis["tokens"], "subword_nmt")
            costs.append(1 - metric.sentence_score(text, [reference]).score / 100)

    tokens = [hypothesis["tokens"] for hypotheses in found for hypothesis in hypotheses]
    collate = partial(data_utils.collate_tokens, tokens, dictionary.pad(), dictionary.eos())
    target, previous = collate(), collate(move_eos_to_beginning=True)
    rows = torch.arange(len(found), device=target.device).repeat_interleave(count)
    logits = model(inputs["src_tokens"][rows], inputs["src_lengths"][rows], previous)
    lprobs = model.get_normalized_probs(logits, log_probs=True).gather(2, target.unsqueeze(2)).squeeze(2)
    real = target != dictionary.pad()
    means = (lprobs * real).sum(dim=1) / real.sum(dim=1)
    p = (SCALE * means.view(-1, count)).softmax(dim=1)
    risk = (p * torch.tensor(costs, device=p.device).view(-1, count)).sum()

    lprobs = model.get_normalized_probs(model(**inputs), log_probs=True)
    losses, _ = label_smoothed_nll_loss(lprobs, sample["target"], EPSILON, dictionary.pad(), reduce=False)
    words = (sample["target"] != dictionary.pad()).sum(dim=1)
    return ALPHA * (losses.squeeze(2).sum(dim=1) / words).sum() + (1 - ALPHA) * risk


def seconds(update: Callable[[], Tensor], model: Any) -> float:
    """Return the seconds of a forward and backward pass."""
    start = time.perf_counter()
    update().backward()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    passed = time.perf_counter() - start
    model.zero_grad()
    return passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="checkpoint of a trained model")
    parser.add_argument("data", help="folder with the binarised training data of the model")
    parser.add_argument("--hypotheses", type=int, default=8, help="hypotheses per sentence (default: %(default)s)")
    parser.add_argument(
        "--risk-cost", choices=METRICS, default="bleu", help="cost of a hypothesis (default: %(default)s)"
    )
    parser.add_argument("--batches", type=int, default=6, help="batches to time (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=1500, help="tokens per batch (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: %(default)s)")
    devices = ["cpu", *["cuda"] * torch.cuda.is_available()]
    parser.add_argument("--device", choices=devices, default="cpu", help="torch device (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([args.checkpoint], {"data": args.data})
    task.load_dataset("train")
    batches = task.get_batch_iterator(task.dataset("train"), max_tokens=args.max_tokens, seed=1).next_epoch_itr()
    samples = [sample for sample, _ in zip(batches, range(args.batches + 1), strict=False)]
    model.to(args.device)
    samples = utils.apply_to_sample(lambda tensor: tensor.to(args.device), samples)

    tokens = LabelSmoothedCrossEntropyCriterion(task, sentence_avg=False, label_smoothing=EPSILON)
    options = {"risk_alpha": ALPHA, "risk_scale": SCALE, "label_smoothing": EPSILON, "risk_cost": args.risk_cost}
    risk = SequenceRisk(task, SequenceRiskConfig(risk_hypotheses=args.hypotheses, **options))
    forms: dict[str, Callable[[dict[str, Any]], Tensor]] = {
        "cross-entropy": lambda sample: tokens(model, sample)[0],
        "sequence_risk": lambda sample: risk(model, sample)[0],
        "plain": lambda sample: plain(task, args.risk_cost, args.hypotheses, model, sample),
    }
    model.eval()
    with torch.no_grad():
        ours, theirs = (float(forms[name](samples[0])) for name in ("sequence_risk", "plain"))
    print(f"loss of the first batch without dropout: {ours:.4f}, of the plain implementation {theirs:.4f}")
    if abs(ours - theirs) > 1e-3 * abs(theirs):
        raise SystemExit("the losses of sequence_risk and its plain implementation differ, so the times mean nothing")
    model.train()

    total = dict.fromkeys(forms, 0.0)
    for number, sample in enumerate(samples):
        for name, form in forms.items():
            passed = seconds(partial(form, sample), model)
            total[name] += passed * (number > 0)  # the first batch is a warm-up
    for name, passed in total.items():
        relative = passed / total["cross-entropy"]
        print(f"{name:14} {passed / args.batches:7.3f} s, {relative:.2f} times as long as cross-entropy")


if __name__ == "__main__":
    main()
