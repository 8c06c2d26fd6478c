"""Flows alone: the test plays the driver."""

import dataclasses

import pytest
import torch
from helpers import task

import engine
import strategies
from engine.request.call import read
from strategies import Emit, Forward, Needs, Rows
from strategies.draw import draw
from strategies.largest import highest, largest
from strategies.operations import needs_of


def test_greedy_asks_emits_and_feeds_what_was_recorded():
    prompt = torch.tensor([[5, 6], [7, 8]])
    seen = []

    def process(ids, logits):
        seen.append(ids.tolist())
        return logits

    flow = strategies.build("greedy").flow(task(prompt, process))
    operation = next(flow)
    assert isinstance(operation, Forward)
    assert operation.tokens is prompt

    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 2.0, 0.0]])
    operation = flow.send(logits)
    assert isinstance(operation, Emit)
    assert operation.tokens.tolist() == [[1], [0]]  # the lowest id on ties
    assert operation.scores[0] is logits

    recorded = torch.tensor([[5, 6, 1], [7, 8, 9]])  # the driver put a pad into the second row
    operation = flow.send(recorded)
    assert operation.tokens.tolist() == [[1], [9]]
    flow.send(logits)
    assert seen == [prompt.tolist(), recorded.tolist()]


def test_sampling_draws_from_the_processed_scores():
    weights = torch.tensor([[0.2, 0.0, 0.8]])
    certain = task(torch.tensor([[1]]), lambda ids, logits: logits * 0 + torch.log(weights))
    flow = strategies.build("sampling").flow(certain)
    next(flow)
    counts = torch.zeros(3)
    for _ in range(2000):
        operation = flow.send(torch.zeros(1, 3))
        counts[operation.tokens] += 1
        flow.send(torch.tensor([[1, 1]]))
    assert counts[1] == 0
    assert abs(counts[0] / 2000 - 0.2) < 0.05  # 5.6 standard deviations


def test_rows_may_become_more_and_everything_follows_them():
    """Every row twice, in the other order: extra inputs, positions, texts and stops belong to rows too."""
    from architectures import prompt, tiny_model

    class Twice:
        name, samples = "twice", False

        def flow(self, task):
            ids, process = task.ids, task.process
            logits = yield Forward(ids)
            ids = yield Emit(process(ids, logits).argmax(-1, keepdim=True))
            yield Rows(torch.tensor([1, 1, 0, 0]))
            ids = ids[[1, 1, 0, 0]]
            while True:
                logits = yield Forward(ids[:, -1:])
                ids = yield Emit(process(ids, logits).argmax(-1, keepdim=True))

    model, inputs = tiny_model("gpt2"), prompt()
    inputs["token_type_ids"] = torch.tensor([[7], [8]]).expand(2, 13)
    expected = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    for cache in ("dynamic", "none"):
        out = engine.generate(model, inputs, cache=cache, strategy=Twice(), max_new_tokens=12)
        assert torch.equal(out.sequences, expected[[1, 1, 0, 0]])


def test_streamed_text_follows_rows(shipped):
    class Swapped:
        name, samples = "swapped", False

        def flow(self, task):
            ids, process = task.ids, task.process
            while True:
                logits = yield Forward(ids if ids.shape[1] == begin else ids[:, -1:])
                ids = yield Emit(process(ids, logits).argmax(-1, keepdim=True))
                yield Rows(torch.tensor([1, 0]))
                ids = ids[[1, 0]]

    texts = ["class A:\n    def f(self", "import os\nimport re\nprint"]
    plain = shipped.generate(texts, max_new_tokens=10, stop_strings=["self", "path"])
    begin = shipped.generate(texts, max_new_tokens=1).sequences.shape[1] - 1
    out = shipped.stream(texts, strategy=Swapped(), max_new_tokens=10, stop_strings=["self", "path"])
    list(out)
    assert sorted(out.result().text) == sorted(plain.text)


def test_a_flow_that_returns_ends_the_run():
    from architectures import prompt, tiny_model

    class ThreeTokens:
        name, samples = "three", False

        def flow(self, task):
            ids = task.ids
            for _ in range(3):
                logits = yield Forward(ids[:, -1:] if ids.shape[1] > 13 else ids)
                ids = yield Emit(logits.argmax(-1, keepdim=True))

    model, inputs = tiny_model("llama"), prompt()
    out = engine.generate(model, inputs, strategy=ThreeTokens(), max_new_tokens=30)
    assert torch.equal(out.sequences, model.generate(**inputs, max_new_tokens=3, do_sample=False))
    assert out.finish_reasons == [None, None]


# BeamState, groups and candidates by hand, over a vocabulary of 4: 3 ends a text.


def logits(*rows):
    """Probabilities, by token, as logits."""
    return torch.tensor(rows).log()


def begun(strategy, first, **of_task):
    """The flow of `strategy` after the prompt 1, whose next token has the probabilities `first`."""
    flow = strategy.flow(task(torch.tensor([[1]]), eos_ids=[3], **of_task))
    assert next(flow).tokens.tolist() == [[1]]
    operation = flow.send(logits(first))
    assert isinstance(operation, Rows)
    assert operation.index.tolist() == [0] * strategy.needs.rows_per_prompt  # the prompt was read once
    return flow


def step(flow, *probabilities):
    """Answers the open Forward; the parents of the rows and the tokens that are fed next, or the end."""
    rows = flow.send(logits(*probabilities) if probabilities else None)
    assert isinstance(rows, Rows)
    operation = flow.send(None)
    if isinstance(operation, strategies.Report):
        operation = flow.send(None)
    if isinstance(operation, Forward):
        return rows.index.tolist(), operation.tokens.flatten().tolist()
    assert isinstance(operation, strategies.Finish)
    return rows.index.tolist(), operation


def shown(flow, *probabilities):
    """Answers the open Forward, and goes on to the next: what is final, and what is best, after this step."""
    flow.send(logits(*probabilities) if probabilities else None)
    operation = flow.send(None)
    assert isinstance(operation, strategies.Report)
    found = operation.final(), operation.best()
    assert isinstance(flow.send(None), Forward)
    return found


def tokens_of(texts):
    return [text.tokens for text in texts]


def test_what_all_beams_have_in_common_is_final():
    flow = begun(strategies.Beam(num_beams=2, num_return_sequences=2), [0.9, 0.1, 0.0, 0.0])
    final, best = shown(flow)
    assert (tokens_of(final), tokens_of(best)) == ([[], []], [[0], [1]])
    final, best = shown(flow, [0.5, 0.3, 0.2, 0.0], [0.4, 0.3, 0.3, 0.0])
    assert (tokens_of(final), tokens_of(best)) == ([[0], [0]], [[0, 0], [0, 1]])
    assert [text.row for text in best] == [0, 1]
    assert not any(text.ended for text in final + best)
    final, best = shown(flow, [0.6, 0.4, 0.0, 0.0], [0.0, 0.1, 0.1, 0.8])  # the end is a text from now on
    assert (tokens_of(final), tokens_of(best)) == ([[0], [0]], [[0, 0, 0], [0, 0, 1]])


def test_a_text_that_has_ended_counts_as_long_as_it_may_be_returned():
    for returned, agreed in ((1, [[0]]), (2, [[], []])):
        beams = strategies.Beam(num_beams=2, num_return_sequences=returned, length_penalty=0.0)
        flow = begun(beams, [0.7, 0.1, 0.0, 0.2], max_columns=9)
        assert tokens_of(shown(flow)[0]) == [[]] * returned  # 3, or more than one
        # 0.7 * 0.4 = 0.28 for 0 3 is more than 0.2 for 3, which only is the second best from now on.
        final, best = shown(flow, [0.35, 0.25, 0.0, 0.4], [1.0, 0.0, 0.0, 0.0])
        assert tokens_of(final) == agreed
        assert tokens_of(best) == [[0, 0], [0, 1]][:returned]


def test_a_prompt_that_is_done_is_shown_with_its_end():
    beams = strategies.Beam(num_beams=2, num_return_sequences=2, early_stopping=True, length_penalty=0.0)
    flow = beams.flow(task(torch.tensor([[1], [2]]), eos_ids=[3]))
    flow.send(None)
    flow.send(logits([0.5, 0.1, 0.0, 0.4], [0.6, 0.4, 0.0, 0.0]))
    assert tokens_of(shown(flow)[0]) == [[], [], [], []]
    going_on = [[0.9, 0.1, 0.0, 0.0], [0.1, 0.1, 0.8, 0.0]]
    final, best = shown(flow, [0.1, 0.0, 0.0, 0.9], [0.5, 0.5, 0.0, 0.0], *going_on)
    assert tokens_of(final) == [[0, 3], [3], [], []]
    assert [text.ended for text in final] == [text.ended for text in best] == [True, True, False, False]
    assert tokens_of(best) == [[0, 3], [3], [0, 0], [1, 2]]
    assert [text.row for text in best][2:] == [2, 3]


def test_beams_of_a_group_that_is_done_do_not_count():
    groups = strategies.DiverseBeam(2, 2, diversity_penalty=1.0, early_stopping=True, length_penalty=0.0)
    flow = begun(groups, [0.5, 0.3, 0.2, 0.0], max_columns=9)
    final, best = shown(flow)
    assert (tokens_of(final), tokens_of(best)) == ([[]], [[0]])
    # The first group has its text, 0 3. Its beam 0 0 runs on, is more probable than that of the second, and in vain.
    final, best = shown(flow, [0.45, 0.0, 0.0, 0.55], [0.3, 0.4, 0.3, 0.0])
    assert (tokens_of(final), tokens_of(best)) == ([[]], [[1, 1]])


def play_to_the_end(early_stopping, length_penalty, first_end=0.2, end=0.7, max_columns=9):
    """Every step a text ends, with `end` of the probability: how many steps there are, and the best text."""
    beams = strategies.Beam(num_beams=2, early_stopping=early_stopping, length_penalty=length_penalty)
    flow = begun(beams, [1 - first_end, 0.0, 0.0, first_end], max_columns=max_columns)
    goes_on = [1 - end, 0.0, 0.0, end]
    _, finish = step(flow)
    steps = 1
    while not isinstance(finish, strategies.Finish):
        _, finish = step(flow, goes_on, goes_on)
        steps += 1
    return steps, finish.tokens[0].tolist()


def test_a_search_ends_when_its_rule_says_so():
    # 0.2, then 0.8 * 0.7 = 0.56: two texts are enough.
    assert play_to_the_end(True, 1.0) == (2, [0, 3])
    # 0.24 runs on, more than 0.2. After the next step 0.072 does: less, or log 0.072 / 3 < log 0.168 / 3.
    assert play_to_the_end(False, 0.0) == play_to_the_end("never", 0.0) == (3, [0, 3])
    assert play_to_the_end(False, 1.0) == (3, [0, 3])
    # As long as it may get, 8 tokens: log 0.072 / 8 and log 0.0216 / 8 may yet be more than log 0.168 / 3.
    assert play_to_the_end("never", 1.0) == (5, [0, 3])
    # Length is worth more than probability.
    assert play_to_the_end(False, 3.0) == (3, [0, 0, 3])
    assert play_to_the_end("never", 3.0) == (8, [0] * 7 + [3])
    # Or length is a loss: what may yet come is as long as what runs, not as long as it may get. log 0.045 * 2 = -6.2 is
    # more than log (0.9 * 0.95 ** 10) * 11, and less than with a token less.
    assert play_to_the_end("never", -1.0, first_end=0.1, end=0.05, max_columns=60) == (11, [3])


def test_pads_are_no_context_and_the_first_candidate_wins_ties():
    masked = dataclasses.replace(task(torch.tensor([[0, 1]])), mask=torch.tensor([[0, 1]]))
    flow = strategies.Contrastive(penalty_alpha=1.0, top_k=2).flow(masked)
    next(flow)
    north, east = [0.0, 1.0], [1.0, 0.0]
    flow.send((logits([0.1, 0.6, 0.3, 0.0]), torch.tensor([[east, north]])))
    flow.send(None)
    flow.send((logits([1.0, 0, 0, 0], [1.0, 0, 0, 0]), torch.tensor([[north], [east]])))
    assert flow.send(None).tokens.tolist() == [[2]]  # as the pad is, but that says nothing
    flow.send(torch.tensor([[0, 1, 2]]))
    candidates = flow.send(None).tokens.flatten().tolist()
    flow.send((logits([1.0, 0, 0, 0], [1.0, 0, 0, 0]), torch.tensor([[east], [east]])))
    assert flow.send(None).tokens.tolist() == [candidates[:1]]


def test_pads_are_not_even_unlike_a_candidate():
    """The least similar of all is the opposite of everything: a pad may not make it similar by 0."""
    masked = dataclasses.replace(task(torch.tensor([[0, 1]])), mask=torch.tensor([[0, 1]]))
    flow = strategies.Contrastive(penalty_alpha=1.0, top_k=2).flow(masked)
    next(flow)
    flow.send((logits([0.1, 0.6, 0.3, 0.0]), torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])))
    flow.send(None)
    flow.send((logits([1.0, 0, 0, 0], [1.0, 0, 0, 0]), torch.tensor([[[0.6, -0.8]], [[0.0, -1.0]]])))
    assert flow.send(None).tokens.tolist() == [[2]]


# What strategies need.


class Plain:
    """As short as a strategy can be."""

    name, samples = "plain", False

    def flow(self, task):
        yield from strategies.Greedy().flow(task)


def test_a_strategy_without_needs_gets_the_defaults():
    assert needs_of(Plain()) == Needs()
    assert needs_of(strategies.Sampling(num_return_sequences=3)).rows_at_a_time == 3
    assert needs_of(strategies.DiverseBeam(num_beams=6, num_beam_groups=3, diversity_penalty=0.1)).rows_at_a_time == 2


def test_needs_are_of_their_class():
    wrong = Plain()
    wrong.needs = {"rows_per_prompt": 2}
    with pytest.raises(
        engine.OptionError, match=r"strategy has needs={'rows_per_prompt': 2}, but they are a strategies.Ne"
    ):
        read("strategy", wrong)


@pytest.mark.parametrize(("width", "count"), [(64 * 1024, 8), (96 * 1024, 33), (5000, 4), (32 * 1023, 2)])
def test_the_largest_scores(width, count):
    scores = torch.randn(3, width)
    scores[1, 100:] = -torch.inf
    scores[2, [0, 70, -1]] = torch.tensor([9.0, torch.inf, 9.5])
    values, indices = largest(scores, count)
    expected = scores.topk(count)
    assert torch.equal(values, expected.values)
    assert torch.equal(scores.gather(1, indices), values)
    assert all(len(set(row)) == count for row in indices.tolist())


@pytest.mark.parametrize("width", [7, 32_000, 64 * 1024, 50_257])
def test_the_highest_score_is_the_first_on_ties(width):
    scores = torch.randn(6, width, generator=torch.Generator().manual_seed(0)).clamp(max=2.0)  # with many ties
    scores[1] = -torch.inf
    scores[2, -1] = torch.inf
    scores[3, [2, 5]] = torch.nan
    scores[4] = 0.0
    assert highest(scores).tolist() == scores.argmax(dim=-1).tolist()
    assert highest(scores)[4] == 0


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("shape", [(1, 7), (3, 32_000), (16, 1000)])
def test_draws_are_those_of_multinomial(shape, tokens):
    """The same tokens, and the generators go on alike."""
    probabilities = torch.randn(shape, generator=torch.Generator().manual_seed(0)).softmax(dim=-1)
    own, other = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    for _ in range(3):
        assert draw(probabilities, own, tokens).equal(torch.multinomial(probabilities, tokens, generator=other))
    torch.manual_seed(2)
    found = draw(probabilities.T.contiguous().T, None)
    torch.manual_seed(2)
    assert found.equal(torch.multinomial(probabilities, 1))


def test_draws_where_multinomial_draws_in_another_way(monkeypatch):
    """Another release of torch may: then its own is called."""
    probabilities = torch.full((1, 8), 0.125)
    monkeypatch.setattr(strategies.draw, "_draws_as_known", lambda: False)
    monkeypatch.setattr(torch, "multinomial", lambda weights, tokens, generator: ("its own", tokens))
    assert draw(probabilities, None, 3) == ("its own", 3)
    assert draw(probabilities.double(), None) == ("its own", 1)
