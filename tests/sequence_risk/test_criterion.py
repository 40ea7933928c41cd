"""The risk, compared with its plain formula: fairseq's generator, and one forward pass per row."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.logging import metrics
from fairseq.models.fconv import FConvModel
from fairseq.models.nat import NATransformerModel
from fairseq.search import Sampling
from fairseq.sequence_generator import SequenceGenerator
from sacrebleu import BLEU
from torch import Tensor

from fairseq_plugins.cpu import dropout_and_loss
from fairseq_plugins.search.generator import FastBeamSearch
from fairseq_plugins.sequence_risk.config import SequenceRiskConfig
from fairseq_plugins.sequence_risk.criterion import SequenceRisk
from fairseq_plugins.sequence_risk.hypotheses import score_rows
from fairseq_plugins.vocabulary.candidates import Candidates
from tests.search.searching import fairseq_model
from tests.sequence_risk.conftest import EOS, PAD, batch, criterion, one_by_one, translation_task

BOS = 0
NO_DECODERS = (torch.nn.Linear, NATransformerModel)  # these models are not autoregressive


def text(dictionary: Dictionary, tokens: list[int]) -> str:
    return " ".join(dictionary[token] for token in tokens if token not in (BOS, EOS))


def bleu(hypothesis: str, reference: str) -> float:
    metric = BLEU(smooth_method="add-k", smooth_value=1, tokenize="none")
    return metric.corpus_score([hypothesis], [[reference]]).score  # `sentence_score` would warn about its options


def plain(
    model: Any,
    sample: dict[str, Any],
    dictionary: Dictionary,
    sets: list[list[list[int]]],
    *,
    alpha: float = 0.3,
    scale: float = 1.0,
    epsilon: float = 0.0,
    words: Tensor | None = None,
) -> Tensor:
    """Return ``Σ α TokLS + (1 - α) Σ_u p(u) cost(u)``, with one forward pass per row."""
    inputs, loss = sample["net_input"], torch.zeros((), dtype=torch.float64, device=sample["target"].device)
    words = torch.arange(len(dictionary), device=loss.device) if words is None else words

    def lprobs(sentence: int, tokens: list[int]) -> tuple[Tensor, Tensor]:
        source = inputs["src_tokens"]  # for the whole batch, because padding changes the outputs of fairseq's fconv
        previous = torch.tensor([[EOS, *tokens[:-1]]] * len(source), device=source.device)
        logits = model(source, inputs["src_lengths"], previous)[0][sentence]
        every = logits[:, words].log_softmax(dim=1)
        target = torch.searchsorted(words, torch.tensor(tokens, device=source.device)).unsqueeze(1)
        return every.gather(1, target).squeeze(1), every

    for sentence, found in enumerate(sets):
        reference = [token for token in sample["target"][sentence].tolist() if token != PAD]
        costs = [1 - bleu(text(dictionary, each), text(dictionary, reference)) / 100 for each in found]
        logits = torch.stack([lprobs(sentence, each)[0].mean() for each in found]) * scale
        p = logits.exp() / logits.exp().sum()
        right, every = lprobs(sentence, reference)
        others = (every.sum(dim=1) - right) / (len(words) - 1)
        token_loss = -((1 - epsilon) * right + epsilon * others).mean()
        loss = loss + alpha * token_loss + (1 - alpha) * (p * torch.tensor(costs, dtype=torch.float64).to(p)).sum()
    return loss


def searched(model: Any, sample: dict[str, Any], dictionary: Dictionary, beam: int) -> list[list[list[int]]]:
    """Return the hypotheses of fairseq's generator for each sentence alone."""
    generator = SequenceGenerator([model], dictionary, beam_size=beam, max_len_a=1.5, max_len_b=5)
    found = [generator.generate([model], one) for one in one_by_one(sample)]
    return [[h["tokens"].tolist() for h in hypotheses] for (hypotheses,) in found]


def assert_same_gradients(models: list[Any], losses: list[Tensor]) -> None:
    for loss in losses:
        loss.backward()
    # fairseq's fconv computes attention in float32.
    for (name, mine), theirs in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-7, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    "options", [{}, {"risk_alpha": 0.0, "risk_scale": 4.0}, {"risk_alpha": 0.6, "label_smoothing": 0.1}]
)
def test_loss_and_gradients(models: list[Any], sample: Any, dictionary: Dictionary, options: dict[str, float]) -> None:
    loss, size, log = criterion(dictionary, risk_hypotheses=5, **options)(models[0], sample)
    sets = searched(models[1], sample, dictionary, 5)
    alpha, scale = options.get("risk_alpha", 0.3), options.get("risk_scale", 1.0)
    expected = plain(
        models[1], sample, dictionary, sets, alpha=alpha, scale=scale, epsilon=options.get("label_smoothing", 0.0)
    )
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
    assert (size, log["sample_size"], log["nsentences"], log["translations"]) == (3, 3, 3, 15)
    assert_same_gradients(models, [loss, expected])


@pytest.mark.parametrize("options", [{}, {"risk_reference": True, "risk_cost": "chrf", "label_smoothing": 0.1}])
def test_a_sentence_does_not_depend_on_its_batch(models, sentences, dictionary, options) -> None:
    """Loss and gradients equal those of the sentence alone, even if hypotheses reach the maximum length."""
    if isinstance(models[0], FConvModel):
        pytest.skip("its encoder convolves over padding")
    sample = batch(sentences([9, 4, 1]), sentences([5, 4, 3], seed=2))
    found = criterion(dictionary, risk_hypotheses=5, **options)
    losses = found(models[0], sample, reduce=False)[0]
    parameters, others = (list(model.parameters()) for model in models)
    for loss, one in zip(losses, one_by_one(sample), strict=True):
        alone = found(models[1], one)[0]
        torch.testing.assert_close(loss, alone, rtol=1e-6, atol=1e-8)
        mine = torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True)
        torch.testing.assert_close(
            mine, torch.autograd.grad(alone, others, materialize_grads=True), rtol=1e-5, atol=1e-7
        )


def test_a_reference_that_is_found_counts_once(models, sample, dictionary, monkeypatch) -> None:
    references = [[token for token in row if token != PAD] for row in sample["target"].tolist()]
    sets = [[[8, EOS], reference] for reference in references]
    for options in ({}, {"risk_reference": True}):
        found = criterion(dictionary, **options)
        monkeypatch.setattr(found.generator, "generate", lambda model, sample: sets)
        loss, _, log = found(models[0], sample)
        torch.testing.assert_close(loss, plain(models[1], sample, dictionary, sets), rtol=1e-9, atol=1e-9)
        assert (log["translations"], log["oracle"]) == (6, 0)
        assert len(found.hypothesis_sets(sample, sets)[0].tokens) == 6, "no row is scored twice"


def test_sampling(models: list[Any], sentences: Any, dictionary: Dictionary) -> None:
    """Hypotheses are the distinct samples of fairseq's generator, whose length limit depends on the longest source."""
    sample = batch(sentences([4, 4, 4]), sentences([5, 4, 3], seed=2))
    models[0].training = True  # submodules stay in evaluation mode, and so without dropout
    torch.manual_seed(5)
    loss, _, log = criterion(dictionary, risk_hypotheses=6, risk_sampling=True)(models[0], sample)
    torch.manual_seed(5)
    options = {"beam_size": 6, "max_len_a": 1.5, "max_len_b": 5, "search_strategy": Sampling(dictionary)}
    generator = SequenceGenerator([models[1]], dictionary, **options)
    drawn = [[h["tokens"].tolist() for h in found] for found in generator.generate([models[1]], sample)]
    sets = [[each for n, each in enumerate(found) if each not in found[:n]] for found in drawn]
    torch.testing.assert_close(loss, plain(models[1], sample, dictionary, sets), rtol=1e-9, atol=1e-9)
    assert log["translations"] == sum(map(len, sets))
    torch.manual_seed(5)
    generator = criterion(dictionary, risk_hypotheses=6, risk_sampling=True).generator
    assert generator.generate(models[0], sample) == drawn


def test_candidate_words(models: list[Any], sample: Any, dictionary: Dictionary) -> None:
    """Search and scores use only the candidates of the batch and the words of the references."""
    always = torch.zeros(len(dictionary), dtype=torch.bool)
    always[:20] = True
    found = Candidates(torch.full((len(dictionary), 1), 30), always)
    loss, _, log = criterion(dictionary, found, risk_hypotheses=4, label_smoothing=0.1)(models[0], sample)
    words = sorted({*range(20), 30, *sample["target"].flatten().tolist()})
    assert 21 < len(words) < len(dictionary)
    task = translation_task(dictionary, candidates=found)
    generator = FastBeamSearch([models[1]], dictionary, candidates=found, beam_size=4, max_len_a=1.5, max_len_b=5)
    sets = [[h["tokens"].tolist() for h in each] for each in task.inference_step(generator, [models[1]], sample)]
    chosen = torch.tensor(words, device=sample["target"].device)
    expected = plain(models[1], sample, dictionary, sets, epsilon=0.1, words=chosen)
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
    assert_same_gradients(models, [loss, expected])
    assert log["translations"] == 12


def test_dropout_is_off_only_in_the_search(build: Any, architecture: str, sample: Any, dictionary: Dictionary) -> None:
    """After the search, modes, names and attributes of the model's modules are as before."""
    model, found = build(architecture, dropout=0.5), criterion(dictionary, risk_hypotheses=3)
    wanted = found.generator.generate(model, sample)
    model.train()
    model.encoder.eval()
    modes, names = [module.training for module in model.modules()], list(model.state_dict())
    attributes = set(vars(model))
    assert found.generator.generate(model, sample) == wanted
    losses = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        losses.append(float(found(model, sample)[0]))
    assert losses[0] != losses[1]
    assert [module.training for module in model.modules()] == modes
    assert list(model.state_dict()) == names
    assert set(vars(model)) == attributes


def test_what_is_logged() -> None:
    """Losses are means over sentences, and the perplexity is that of words in bits."""
    log = {"loss": 6.0, "risk": 1.5, "best": 1.2, "oracle": 0.9, "translations": 12, "nsentences": 3, "batches": 2}
    with metrics.aggregate(new_root=True) as shown:
        SequenceRisk.reduce_metrics([{**log, "nll_loss": 8 * math.log(2), "ntokens": 4, "search": 1.0, "scoring": 5.0}])
    expected = {"loss": 2, "risk": 0.5, "best": 0.4, "oracle": 0.3, "translations": 4, "nll_loss": 2, "ppl": 4}
    assert dict(shown.get_smoothed_values()) == pytest.approx({**expected, "search": 0.5, "scoring": 2.5})


@pytest.mark.parametrize("too_large", [True, False])
def test_a_lack_of_memory_is_told_from_other_errors(build, sample, dictionary, monkeypatch, too_large) -> None:
    """fairseq skips a batch on a GPU if the message has torch's words; another error must stop training."""
    error, found = RuntimeError("sizes differ"), criterion(dictionary, risk_hypotheses=40)

    def fail(*_: object) -> None:
        if too_large:
            torch.empty(2**62, dtype=torch.int8)
        raise error

    monkeypatch.setattr(found.generator, "generate", fail)
    with pytest.raises(RuntimeError, match=r"^--risk-hypotheses 40: out of memory|^sizes differ$") as raised:
        found(build("convs2s_tiny"), sample)
    assert (raised.value is error) != too_large


@pytest.mark.parametrize("architecture", ["convs2s_tiny", "weighted_transformer_tiny"])
def test_a_reference_beyond_the_positions(build, architecture, sample, sentences, dictionary) -> None:
    """The model computes the same after the error, because fairseq continues with the model after some errors."""
    model = build(architecture)
    expected, _ = model(**sample["net_input"])
    with pytest.raises(ValueError, match="70"):
        criterion(dictionary, risk_hypotheses=3)(model, batch(sentences([6]), sentences([70])))
    assert torch.equal(model(**sample["net_input"])[0], expected)


def test_models_that_cannot_be_trained_are_refused(task: SimpleNamespace, dictionary: Dictionary) -> None:
    adaptive = fairseq_model("transformer_tiny", task)
    adaptive.decoder.adaptive_softmax = torch.nn.Identity()
    for model, name in ((adaptive, "adaptive"), *((kind.__new__(kind), kind.__name__) for kind in NO_DECODERS)):
        with pytest.raises(ValueError, match=name):
            criterion(dictionary)(model, {})


def test_tasks_of_several_languages_are_refused(dictionary: Dictionary) -> None:
    """Tasks of several languages need a common dictionary; fairseq's `target_dictionary` belongs to one language."""
    with pytest.raises(ValueError, match="--decoder-langtok"):
        SequenceRisk(translation_task(dictionary, args=SimpleNamespace(decoder_langtok=True)), SequenceRiskConfig())
    other = Dictionary()
    languages = {"lang_pairs": ["en-de", "en-cs"], "dicts": {"en": other, "de": dictionary, "cs": other}}
    with pytest.raises(ValueError, match="dictionary"):
        SequenceRisk(translation_task(dictionary, **languages), SequenceRiskConfig())
    languages["dicts"] = {"src": other, "tgt": dictionary}  # from --target-dict, for all languages
    SequenceRisk(translation_task(dictionary, **languages), SequenceRiskConfig())


@pytest.mark.parametrize("name", ["convs2s_tiny", "weighted_transformer_tiny"])
def test_a_tree_has_dropout_where_rows_have_it(build, sample, dictionary, double, monkeypatch, name) -> None:
    """A factor replaces dropout in this test, so that results can be compared."""
    model = build(name, dropout=0.5, attention_dropout=0.0, relu_dropout=0.0).double()
    rows, _ = criterion(dictionary).hypothesis_sets(sample, searched(model, sample, dictionary, 4))
    model.train()
    monkeypatch.setattr(dropout_and_loss, "dropout", lambda x, p: x * (1 + p))
    tree = score_rows(model, sample["net_input"], rows, PAD)
    monkeypatch.delattr(type(model.decoder), "features_of_prefixes")
    in_rows = score_rows(model, sample["net_input"], rows, PAD)
    torch.testing.assert_close(tree.tokens, in_rows.tokens)
    torch.testing.assert_close(tree.sums, in_rows.sums)
    model.eval()
    assert not torch.allclose(score_rows(model, sample["net_input"], rows, PAD).tokens, in_rows.tokens)
