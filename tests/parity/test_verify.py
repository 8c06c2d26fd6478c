"""Proposed tokens and their verification, without any model: the test plays the driver."""

import itertools

import pytest
import torch
from helpers import task

import strategies
from strategies import Assisted, Crop, Emit, Forward, PromptLookup, Translation

PAD = 9


class Player:
    """Plays the driver. What comes next depends on the last token alone: row t of `target` has the probabilities after
    t, that of `draft` those of the draft. stops: columns at which the driver ends a row, by row.
    """

    def __init__(self, target, draft=None, stops=None, eos_ids=()):
        self.target, self.draft, self.stops, self.eos_ids = target, draft, stops or {}, eos_ids
        self.fed = {"main": None, "draft": None}
        self.forwards = []

    def play(self, strategy, prompt, new, **of_task):
        ids, columns = prompt, prompt.shape[1] + new
        self.task = task(prompt, max_columns=columns, eos_ids=self.eos_ids, **of_task)
        flow, answer, over = strategy.flow(self.task), None, torch.zeros(len(prompt), dtype=torch.bool)
        while ids.shape[1] < columns and not over.all():
            match flow.send(answer):
                case Forward(tokens, _, every, model):
                    self.check_goes_on(ids, tokens, model, columns)
                    table = self.target if model == "main" else self.draft
                    logits = table[tokens].log()
                    answer = logits if every else logits[:, -1]
                    self.forwards.append((model, tokens.shape[1]))
                case Crop(tokens, model):
                    assert 0 < tokens <= self.fed[model].shape[1]
                    self.fed[model], answer = self.fed[model][:, :-tokens], None
                case Emit(tokens, scores):
                    assert len(scores) == tokens.shape[1]
                    for column, of_column in zip(tokens.T, scores, strict=True):
                        assert of_column.shape == (len(prompt), self.target.shape[1])
                        ids = torch.cat([ids, column.masked_fill(over, PAD)[:, None]], dim=1)
                        over = over | torch.isin(column, torch.tensor(self.eos_ids))
                        for row, at in self.stops.items():
                            over[row] |= ids.shape[1] >= at
                        if over.all() or ids.shape[1] == columns:
                            break
                    answer = ids
        flow.close()
        return ids

    def check_goes_on(self, ids, tokens, model, columns):
        """What is fed comes after what was, and together they begin with the text, in every row that goes on."""
        fed = self.fed[model]
        whole = tokens if fed is None else torch.cat([fed, tokens], dim=1)
        assert whole.shape[1] >= ids.shape[1]
        assert torch.equal(whole[goes_on := ids[:, -1] != PAD, : ids.shape[1]], ids[goes_on])
        assert whole.shape[1] < columns  # the last token need not be fed
        self.fed[model] = whole


def tables(words=4, seed=0, sharp=1.5):
    """Two distributions after each word [words + pads, words + pads]; a pad is never drawn."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(2):
        table = torch.zeros(PAD + 1, PAD + 1)
        table[:, :words] = (sharp * torch.randn(PAD + 1, words, generator=generator)).softmax(dim=-1)
        found.append(table)
    return found


def greedy(target, prompt, new, eos_ids=(), stops=None):
    rows = []
    for row, text in enumerate(prompt.tolist()):
        over = False
        for _ in range(new):
            text.append(PAD if over else int(target[text[-1]].argmax()))
            over = over or text[-1] in eos_ids or len(text) >= (stops or {}).get(row, len(text) + 1)
        rows.append(text)
    return torch.tensor(rows)


PROMPT = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0], [1, 1]])
STRATEGIES = {
    "draft": Assisted(4, assistant_confidence_threshold=0.0),
    "one token": Assisted(1, assistant_confidence_threshold=0.0),
    "growing": Assisted(2, "heuristic", assistant_confidence_threshold=0.0),
    "unsure": Assisted(6, assistant_confidence_threshold=0.6),
    "lookup": PromptLookup(3, 2),
    "long lookup": PromptLookup(50, 3),
}


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("new", [1, 2, 3, 11])
def test_greedy_text(strategy, rows, new):
    for seed in range(6):
        target, draft = tables(words=8, seed=seed)
        for good in (draft, target):
            player = Player(target, good)
            out = player.play(strategy, PROMPT[:rows], new, pad_id=PAD)
            assert torch.equal(out, greedy(target, PROMPT[:rows], new))


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_rows_end_each_in_its_own_place(strategy):
    """At an eos id, or where the driver stops them."""
    ended = set()
    for seed, eos_ids, stops in itertools.product(range(4), ([], [7], [4, 5]), ({}, {0: 5}, {1: 4, 2: 9})):
        target, draft = tables(words=8, seed=seed, sharp=1)
        expected = greedy(target, PROMPT, 11, eos_ids, stops)
        if (expected[:, -1] == PAD).all():
            expected = expected[:, : int((expected != PAD).sum(dim=1).max())]
        for good in (draft, target):
            out = Player(target, good, stops, eos_ids).play(strategy, PROMPT, 11, pad_id=PAD)
            assert torch.equal(out, expected)
        ended.add(tuple((expected != PAD).sum(dim=1).tolist()))
    assert len(ended) > 10


def test_a_row_that_has_ended_holds_nobody_up():
    target = torch.eye(PAD + 1).roll(1, dims=1)  # 0, 1, 2, ... 9
    draft = target.clone()
    draft[9] = draft[3]  # after pads it is wrong
    player = Player(target, draft, stops={0: 4})
    out = player.play(Assisted(4, assistant_confidence_threshold=0.0), torch.tensor([[5], [0]]), 9, pad_id=PAD)
    assert out.tolist() == [[5, 6, 7, 8] + [PAD] * 6, list(range(10))]
    assert player.task.drafts.verifications == 2  # 1, then 4 + 1 of both, then 3 of the second


def test_a_good_draft_saves_forwards():
    target, draft = tables()
    player = Player(target, target)
    player.play(Assisted(4, assistant_confidence_threshold=0.0), PROMPT, 11, pad_id=PAD)
    assert [forward for forward in player.forwards if forward[0] == "main"] == [("main", 2), ("main", 5), ("main", 5)]
    drafts = player.task.drafts
    assert (drafts.drafted, drafts.accepted, drafts.verifications) == (40, 40, 2)
    assert drafts.length == 4
    bad = Player(target, draft.flip(1).roll(-PAD + 3, dims=1))
    bad.play(Assisted(4, assistant_confidence_threshold=0.0), PROMPT[:1], 11, pad_id=PAD)
    assert bad.task.drafts.accepted < bad.task.drafts.drafted
    assert bad.task.drafts.verifications > 2


@pytest.mark.parametrize(
    ("schedule", "lengths"),
    [("constant", [3, 3, 3, 3]), ("heuristic", [3, 5, 7, 6]), ("heuristic_transient", [3, 5, 7, 6])],
)
def test_how_many_are_proposed(schedule, lengths):
    """Two more after all were right, else one fewer."""
    target = torch.eye(40).roll(1, dims=1)
    draft = target.clone()
    draft[12] = draft[0]  # the draft is wrong after 12
    proposed = []

    class Notes(Player):
        def check_goes_on(self, ids, tokens, model, columns):
            super().check_goes_on(ids, tokens, model, columns)
            if model == "main" and len(self.forwards):
                proposed.append(tokens.shape[1] - 1)

    # 0 1 | 2 3 4 5 | 6 7 8 9 10 11 | 12 13, the rest is wrong | ...
    Notes(target, draft).play(Assisted(3, schedule, 0.0), torch.tensor([[0]]), 30)
    assert proposed[: len(lengths)] == lengths


def test_an_unsure_draft_stops_after_the_token_it_is_unsure_of():
    target = torch.eye(10).roll(1, dims=1)
    draft = 0.97 * target + 0.003
    draft[4] = 0.4 * target[4] + 0.06
    player = Player(target, draft)
    player.play(Assisted(8, assistant_confidence_threshold=0.5), torch.tensor([[0]]), 9)
    assert player.forwards[:6] == [("main", 1), ("draft", 2), ("draft", 1), ("draft", 1), ("draft", 1), ("main", 5)]


def test_a_memory_of_the_length_is_begun_with():
    strategy, target = Assisted(3, "heuristic", 0.0), torch.eye(40).roll(1, dims=1)
    player, drafts = Player(target, target), strategies.SpeculationStats(length=9)
    player.play(strategy, torch.tensor([[0]]), 30, drafts=drafts)
    assert player.forwards.index(("main", 10)) > 0
    assert drafts.length > 9


def test_proposals_that_do_not_pay_are_rare():
    """One that is never right is asked every ninth step, after the first 100 tokens; the text is the same."""
    target = torch.eye(40).roll(1, dims=1)
    player = Player(target, torch.eye(40))  # it repeats the last token
    drafts, prompt = strategies.SpeculationStats(price=0.2), torch.tensor([[0], [3]])
    ids = player.play(Assisted(5, assistant_confidence_threshold=0.0), prompt, 100, drafts=drafts)
    assert torch.equal(ids, (prompt + torch.arange(101)) % 40)
    assert (drafts.drafted, drafts.accepted) == (190, 0)  # 10 steps of 10 tokens, and 9 of the 90 others
    tokens = [tokens for model, tokens in player.forwards if model == "main"]
    assert tokens[11:30] == [*[1] * 8, 6, *[1] * 8, 6, 1]


def test_proposals_are_made_again_where_they_pay_again():
    target = torch.eye(200).roll(1, dims=1)
    target[180:], target[180:, 180] = 0, 1  # from there on the text repeats a token
    drafts = strategies.SpeculationStats()
    player = Player(target)
    # Every token of the new text is in the prompt, where another comes after it.
    prompt = torch.tensor([[*(token for word in range(1, 180) for token in (word, 0)), 0]])
    ids = player.play(PromptLookup(10, 1), prompt, 300, drafts=drafts)
    assert torch.equal(ids[0, -300:], torch.arange(1, 301).clamp(max=180))
    assert [tokens for _, tokens in player.forwards[1:11]] == [11] * 10
    wrong = [tokens for _, tokens in player.forwards[11:160]]
    assert wrong.count(11) == pytest.approx(len(wrong) / 9, abs=2)
    assert [tokens for _, tokens in player.forwards[-9:-1]] == [11] * 8


@pytest.mark.parametrize("price", [0.0, 0.9])
@pytest.mark.parametrize("strategy", [PromptLookup(6, 1), PromptLookup(6, 1, do_sample=True)])
def test_rows_with_fixed_tokens_while_nothing_is_proposed(strategy, price):
    """Tokens of a row that is ahead are fed again, and not counted as proposed."""
    target, _ = tables(words=3, sharp=3.0)
    prompt = torch.randint(0, 3, (4, 12), generator=torch.Generator().manual_seed(1))
    drafts = strategies.SpeculationStats(price=price)
    torch.manual_seed(0)
    ids = Player(target).play(strategy, prompt, 200, drafts=drafts)
    if not strategy.samples:
        assert torch.equal(ids, greedy(target, prompt, 200))
    assert 0 < drafts.accepted < drafts.drafted
    assert drafts.pays is (price == 0.0)


def test_lookup_takes_the_first_place_of_the_longest_words():
    lookup = PromptLookup(3, 2)
    for text, found in (
        ([7, 1, 2, 3, 4, 5, 1, 2], [3, 4, 5]),
        ([7, 2, 8, 1, 2, 3, 4, 1, 2, 6, 1, 2], [3, 4, 1]),  # not what came after 2, nor what came later
        ([7, 2, 8, 9, 5, 2], [8, 9, 5]),
        ([1, 2, 3, 3], [3]),
        ([1, 2, 3], []),
        ([4], []),
        ([], []),
    ):
        assert lookup.look_up(torch.tensor(text)).tolist() == found


def test_pads_are_no_words():
    ids = torch.tensor([[4, 4, 4, 6, 3]])
    for mask, fed in (([0, 0, 0, 1, 1], [5, 1, 1]), ([1, 1, 1, 1, 1], [5, 2, 1])):
        player = Player(torch.eye(PAD + 1).roll(1, dims=1))  # 4 comes next
        player.play(PromptLookup(2, 1), ids, 3, mask=torch.tensor([mask]))
        assert [tokens for _, tokens in player.forwards] == fed


def test_processors_see_texts_that_get_longer_and_what_was_proposed():
    target, _ = tables()
    seen = []

    def process(ids, scores):
        seen.append(ids.clone())
        return scores

    player = Player(target, target)
    out = player.play(Assisted(3, assistant_confidence_threshold=0.0), PROMPT[:1], 5, process=process, pad_id=PAD)
    columns = [ids.shape[1] for ids in seen]
    assert columns == [2, 3, 4, 5, 3, 4, 5, 6]  # the first token; the draft's three; the model's four, in order
    assert all(torch.equal(ids, out[:, : ids.shape[1]]) for ids in seen)


# Sampling.


def check_distribution(rows, target):
    """`rows` [n, 1 + new]: texts that begin with the same word. A chi-square test over all texts.

    A statistic this far out comes once in more than a million (6 standard deviations, with the cube root of it being
    nearly normal), and the seeds are fixed: it passes always or never.
    """
    new = rows.shape[1] - 1
    words = torch.tensor(list(itertools.product(range(4), repeat=new)))
    expected = torch.ones(len(words))
    last = rows[0, 0].expand(len(words))
    for column in words.T:
        expected *= target[last, column]
        last = column
    found = torch.bincount((rows[:, 1:] * 4 ** torch.arange(new - 1, -1, -1)).sum(dim=1), minlength=len(words))
    often = expected * len(rows) >= 5
    pooled = [torch.cat([part[often].double(), part[~often].double().sum()[None]]) for part in (found, expected)]
    pooled = [part for part in zip(*pooled, strict=True) if part[1] > 0]
    chi = sum((n - len(rows) * p) ** 2 / (len(rows) * p) for n, p in pooled)
    freedom = len(pooled) - 1
    off = ((chi / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
    assert off < 6, f"{off:.1f} standard deviations"
    return float(off)


SAMPLING = {
    "draft": Assisted(3, assistant_confidence_threshold=0.0, do_sample=True),
    "unsure": Assisted(3, assistant_confidence_threshold=0.35, do_sample=True),
    "growing": Assisted(1, "heuristic", assistant_confidence_threshold=0.0, do_sample=True),
    "lookup": PromptLookup(3, 2, do_sample=True),
}


@pytest.mark.parametrize("strategy", SAMPLING.values(), ids=SAMPLING)
def test_a_batch_is_drawn_from_the_models_distribution(strategy):
    """8000 rows at once: nearly all that is drawn waits as fixed tokens until the slowest row is there."""
    target, draft = tables(seed=2, sharp=1)
    torch.manual_seed(1)
    prompt = torch.tensor([[2, 0, 1, 2, 0]]).repeat(8000, 1)
    out = Player(target, draft).play(strategy, prompt, 4, pad_id=PAD)
    check_distribution(out[:, 4:], target)


@pytest.mark.parametrize("strategy", SAMPLING.values(), ids=SAMPLING)
def test_single_rows_are_drawn_from_the_models_distribution(strategy):
    target, draft = tables(seed=3, sharp=1)
    torch.manual_seed(2)
    rows = [Player(target, draft).play(strategy, torch.tensor([[2, 0, 1, 2, 0]]), 3, pad_id=PAD) for _ in range(600)]
    check_distribution(torch.cat(rows)[:, 4:], target)


def test_the_test_of_distributions_can_fail():
    target, draft = tables(seed=2, sharp=1)
    torch.manual_seed(1)
    rows = torch.zeros(20000, 1, dtype=torch.long)
    for _ in range(3):
        rows = torch.cat([rows, torch.multinomial((0.9 * target + 0.1 * draft)[rows[:, -1]], 1)], dim=1)
    with pytest.raises(AssertionError, match="standard deviations"):
        check_distribution(rows, target)


def test_fixed_tokens_are_not_drawn_again():
    """The second row accepts all, the first nothing: what the second has got is emitted later, whatever is drawn."""
    torch.manual_seed(0)
    strategy = Assisted(3, assistant_confidence_threshold=0.0, do_sample=True)
    flow = strategy.flow(task(torch.tensor([[1], [1]])))
    assert isinstance(next(flow), Forward)
    sure = torch.eye(10).log()
    operation = flow.send(sure[[2, 2]])
    assert operation.tokens.tolist() == [[2], [2]]
    ids = torch.tensor([[1, 2], [1, 2]])
    operation = flow.send(ids)
    for token in (3, 4, 5):
        assert operation.model == "draft"
        operation = flow.send(sure[[token, token]])
    assert operation.tokens.tolist() == [[2, 3, 4, 5]] * 2
    # The model: 7 in the first row, where 3 was proposed; 3, 4, 5 and then 6 in the second.
    operation = flow.send(torch.stack([sure[[7, 0, 0, 0]], sure[[3, 4, 5, 6]]]))
    assert operation == Crop(3)
    operation = flow.send(None)
    assert operation.tokens.tolist() == [[7], [3]]
    operation = flow.send(torch.tensor([[1, 2, 7], [1, 2, 3]]))
    assert operation == Crop(2, model="draft")
    operation = flow.send(None)
    assert (operation.tokens.tolist(), operation.model) == ([[7], [3]], "draft")
    for feeds in ([[8], [4]], [[8], [5]]):  # the draft is fed what is fixed, whatever it says
        operation = flow.send(sure[[8, 1]])
        assert (operation.tokens.tolist(), operation.model) == (feeds, "draft")
    operation = flow.send(sure[[8, 1]])
    assert operation.tokens.tolist() == [[7, 8, 8, 8], [3, 4, 5, 6]]
    # Drawn again, 0 would come: it is all that these logits allow.
    operation = flow.send(torch.stack([sure[[8, 8, 8, 9]], sure[[0, 0, 0, 9]]]))
    assert operation.tokens.tolist() == [[8, 8, 8, 9], [4, 5, 6, 9]]


def test_a_draft_that_equals_the_model_is_always_accepted_and_a_wrong_one_hardly_ever():
    target, _ = tables(sharp=1)
    strategy = SAMPLING["draft"]
    torch.manual_seed(0)
    player = Player(target, target)
    player.play(strategy, PROMPT.repeat(20, 1), 9, pad_id=PAD)
    assert player.task.drafts.accepted == player.task.drafts.drafted == 100 * 6
    wrong = torch.zeros_like(target)
    wrong[:, 8] = 1  # never said by the model
    player = Player(target, wrong)
    player.play(strategy, PROMPT, 9, pad_id=PAD)
    assert player.task.drafts.accepted == 0


# A draft with other ids: the same words, backwards, and one more in front.


def test_a_draft_with_a_vocabulary_of_its_own():
    target, _ = tables(seed=4)

    def to_draft(ids):
        return torch.cat([torch.tensor([[8]]), 7 - ids], dim=1)

    def to_model(ids, text, known):
        assert torch.equal(text[:, :known], to_draft(ids))
        return 7 - text[:, known:]

    draft = torch.zeros_like(target)
    draft[:8, :8] = target[:8, :8].flip(0, 1)
    player = Player(target, draft)
    player.check_goes_on = lambda ids, tokens, model, columns: None
    player.fed["draft"] = torch.zeros(1, 99, dtype=torch.long)
    translation = Translation(to_draft, to_model, max_columns=99)
    out = player.play(Assisted(4, assistant_confidence_threshold=0.0), PROMPT[:1], 11, translation=translation)
    assert torch.equal(out, greedy(target, PROMPT[:1], 11))
    assert player.task.drafts.accepted == player.task.drafts.drafted == 8
    short = Translation(to_draft, to_model, max_columns=6)  # room for one proposal only
    out = player.play(Assisted(4, assistant_confidence_threshold=0.0), PROMPT[:1], 11, translation=short)
    assert torch.equal(out, greedy(target, PROMPT[:1], 11))
    assert player.task.drafts.drafted == 1
