"""Flows alone: the test plays the driver."""

import torch
from support import toy_flow

import engine
import strategies
from strategies import Crop, Emit, Forward, Rows


def test_names():
    assert {"greedy", "sampling"} <= set(strategies.names())


def test_greedy_asks_emits_and_feeds_what_was_recorded():
    prompt = torch.tensor([[5, 6], [7, 8]])
    seen = []

    def process(ids, logits):
        seen.append(ids.tolist())
        return logits

    flow = strategies.build("greedy").flow(prompt, process)
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
    flow = strategies.build("sampling").flow(torch.tensor([[1]]), lambda ids, logits: logits * 0 + torch.log(weights))
    weights = torch.tensor([[0.2, 0.0, 0.8]])
    next(flow)
    counts = torch.zeros(3)
    for _ in range(2000):
        operation = flow.send(torch.zeros(1, 3))
        counts[operation.tokens] += 1
        flow.send(torch.tensor([[1, 1]]))
    assert counts[1] == 0
    assert abs(counts[0] / 2000 - 0.2) < 0.05  # 5.6 standard deviations


def test_the_driver_carries_out_every_operation():
    """A strategy of one's own, with rollback and reordering, gives greedy text: nothing it took back is left."""
    from architectures import prompt, tiny_model

    class Wasteful:
        """Feeds two wrong tokens before every right one, takes them back, and swaps the rows twice."""

        name, samples = "wasteful", False

        def flow(self, ids, process):
            logits = yield Forward(ids)
            while True:
                ids = yield Emit(process(ids, logits).argmax(-1, keepdim=True))
                yield Rows(torch.tensor([1, 0]))
                yield Forward(torch.full((2, 2), 77))
                yield Crop(2)
                yield Rows(torch.tensor([1, 0]))
                logits = yield Forward(ids[:, -1:])

    for name in ("llama", "mistral"):
        model, inputs = tiny_model(name), prompt()
        for cache in ("dynamic", "static", "none"):
            out = engine.generate(model, inputs, cache=cache, strategy=Wasteful(), max_new_tokens=30)
            assert torch.equal(out.sequences, model.generate(**inputs, max_new_tokens=30, do_sample=False))


def test_rows_may_become_more_and_everything_follows_them():
    """Every row twice, in the other order: extra inputs, positions, texts and stops belong to rows too."""
    from architectures import prompt, tiny_model

    class Twice:
        name, samples = "twice", False

        def flow(self, ids, process):
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

        def flow(self, ids, process):
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

        def flow(self, ids, process):
            for _ in range(3):
                logits = yield Forward(ids[:, -1:] if ids.shape[1] > 13 else ids)
                ids = yield Emit(logits.argmax(-1, keepdim=True))

    model, inputs = tiny_model("llama"), prompt()
    out = engine.generate(model, inputs, strategy=ThreeTokens(), max_new_tokens=30)
    assert torch.equal(out.sequences, model.generate(**inputs, max_new_tokens=3, do_sample=False))
    assert out.finish_reasons == [None, None]


def test_several_tokens_may_be_emitted_at_once():
    from architectures import prompt, tiny_model

    model, inputs = tiny_model("llama"), prompt()
    out = engine.generate(model, inputs, strategy=toy_flow([[3, 4, 5], [6, 7, 8]]), max_new_tokens=5, eos_token_id=4)
    assert out.sequences[0, 13:].tolist() == [3, 4, 0, 0, 0]
    assert out.sequences[1, 13:].tolist() == [6, 7, 8, 6, 7]
    assert out.finish_reasons == ["eos", "length"]
    assert out.stats.new_tokens == 2 + 5
