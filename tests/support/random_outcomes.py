"""How a random call comes out on both sides, and whether docs/reference/differences.md tells of what differs."""

from __future__ import annotations

import ast
import copy
import re
import warnings
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from typing import Any

import random_models
import torch
import transformers
from places import ROOT
from random_calls import PAIRS, Call
from random_records import compared_records, reads_all

import caches
import engine

PAGE = ROOT / "docs" / "reference" / "differences.md"
NEW = 3  # tokens of a second turn
REFUSALS = (engine.EngineError, caches.CacheError)

# The page.


@dataclass(frozen=True)
class Told:
    """One row of a table on the page. beginning: of a message, with `...` for what varies; or the name of a case."""

    table: str
    beginning: str

    def matches(self, message: str) -> bool:
        parts = [re.escape(part) for part in self.beginning.split("...")]
        return re.match(".*?".join(parts), message, flags=re.DOTALL) is not None


@cache
def told() -> list[Told]:
    """What the tables say. A table's first column has the messages in backticks."""
    rows, table = [], ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            table = line[3:]
        elif line.startswith("| `"):
            first = line.split(" | ")[0]
            rows += [Told(table, found) for found in re.findall(r"`([^`]+)`", first)]
    return rows


def on_the_page(table: str, message: str) -> str | None:
    """The longest beginning of this message that the table has."""
    found = [row.beginning for row in told() if row.table == table and row.matches(message)]
    return max(found, key=len, default=None)


@cache
def literals() -> str:
    """All texts in the code, each on a line of its own; what is filled in while it runs is left out."""
    found = []
    for folder in ("engine", "caches", "strategies", "configs"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return "\n".join(found)


# Both sides.


class NoCall(Exception):
    """There are no such arguments."""


def _namespace(call: Call) -> dict[str, Any]:
    names = {name: getattr(random_models, name) for name in dir(random_models) if not name.startswith("_")}
    for name in ("GenerationConfig", "LogitsProcessorList", "StoppingCriteriaList", "WatermarkingConfig",
                 "DynamicCache"):  # fmt: skip
        names[name] = getattr(transformers, name)
    the = random_models.model(call.name, getattr(torch, call.dtype.removeprefix("torch.")))
    return names | {"torch": torch, "copy": copy, "engine": engine, "the": the}


def run(call: Call, ours: bool) -> Any:
    """What it gives, or what it raises."""
    names = _namespace(call)
    the, own = names["the"], copy.deepcopy(names["the"].generation_config)
    try:
        try:
            for statement in call.setup:
                exec(statement, names)
            given = {name: eval(source, names) for name, source in call.given.items()}
        except ValueError:  # transformers makes no such configuration
            return NoCall()
        torch.manual_seed(7)
        if ours:
            return engine.generate(the, **given, **eval(f"dict({call.own})", names))
        return transformers.GenerationMixin.generate(the, **given)
    except Exception as error:
        return error
    finally:
        the.generation_config = own


# Cases of the page in which transformers itself, asked in a plainer way, says what the engine says.


def without(call: Call, *names: str) -> Call:
    """The call without these parameters, wherever they stand."""
    pattern = re.compile(rf"\b({'|'.join(names)})=[^,()\[\]]+(, )?")
    given = {name: pattern.sub("", source) for name, source in call.given.items() if name not in names}
    return replace(call, given=given, setup=[pattern.sub("", statement) for statement in call.setup])


def _with_mask(call: Call) -> Call:
    embeds = eval(call.given["inputs_embeds"], _namespace(call))
    mask = f"torch.ones({list(embeds.shape[:2])}, dtype=torch.long)"
    return replace(call, given=call.given | {"attention_mask": mask})


def _without_drafts(call: Call) -> Call:
    return without(call, "assistant_model", "prompt_lookup_num_tokens", "num_assistant_tokens")


def plainer(call: Call) -> tuple[str, Call | None] | None:
    """The cases, and the plainer call; no call where there is none that could be compared."""
    given, said = call.given, call.script()
    guided = re.search(r"guidance_scale=(?!1\b(?!\.))", said) is not None
    if not {"input_ids", "inputs", "inputs_embeds", "encoder_outputs"} & set(given) and "pad_token_id=1" in said:
        return "no prompt where one id begins and pads", None
    if guided and re.search(r"num_beams=[2-9]", said):
        return "guidance in a beam search", None
    if guided and call.name == "mamba":
        return "guidance of a model with states alone", None
    if guided and str(_pad(call)) in re.findall(r"\d+", given.get("negative_prompt_ids", "")):
        return "pads in a negative prompt", None
    cases, other = [], call
    for name, holds, change in (
        ("drafts that change the text", call.drafts, _without_drafts),
        ("embeddings beside ids without a mask", {"inputs_embeds", "input_ids"} <= set(given)
         and "attention_mask" not in given, _with_mask),
        ("prompts of a decoder in pieces", call.name in PAIRS and "prefill_chunk_size" in said,
         lambda one: without(one, "prefill_chunk_size")),
    ):  # fmt: skip
        if holds:
            cases, other = [*cases, name], change(other)
    return (", ".join(cases), other) if cases else None


def outcome(call: Call) -> tuple[str, str]:
    """The kind, and what there is to say about it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind, what = _told(call)
    cases = kind.removeprefix("equal: ").split(", ") if kind.startswith("equal: ") else []
    missing = [case for case in cases if on_the_page("Other texts", case) is None]
    return ("not on the page", f"{missing}: {what}") if missing else (kind, what)


def _told(call: Call) -> tuple[str, str]:
    kind, what = _outcome(call, run(call, ours=False))
    if kind != "different" or (case := plainer(call)) is None:
        return kind, what
    name, other = case
    if other is None:
        return f"equal: {name}", what
    kind, more = _outcome(call, run(other, ours=False))
    return (f"equal: {name}", what) if kind.startswith("equal") else ("different", f"{what}; {name}: {kind} {more}")


def _outcome(call: Call, theirs: Any) -> tuple[str, str]:
    ours = run(call, ours=True)
    if isinstance(ours, NoCall):
        return "no such configuration", ""
    if isinstance(ours, Exception) and not isinstance(ours, REFUSALS):
        return "different", f"the engine raises a bare {type(ours).__name__}: {ours}"
    if isinstance(ours, engine.GenerationInterrupted) and not isinstance(ours, engine.InvalidLogitsError):
        return "different", f"the engine stops late, {ours}, where transformers says {theirs!r}"
    if isinstance(ours, Exception) and isinstance(theirs, Exception):
        return "both refuse", ""
    if isinstance(ours, Exception):
        return _by_the_page("Refused by kvengine", "refused here", str(ours), call)
    if isinstance(theirs, TypeError) and str(theirs).startswith("create_chunked_causal_mask() got an unexpected"):
        return "transformers 5.17 makes no mask of this model", ""
    if isinstance(theirs, Exception):
        return _by_the_page("Refused by transformers", "runs here only", f"{type(theirs).__name__}: {theirs}", call)
    kind, what = compared(call, ours, theirs)
    if kind == "different" and call.dtype == "torch.float32":
        exact = replace(call, dtype="torch.float64", given={
            name: source.replace("torch.float32", "torch.float64") for name, source in call.given.items()
        })  # fmt: skip
        again = [run(exact, ours=mine) for mine in (True, False)]
        if not any(isinstance(one, Exception) for one in again):
            kind, more = compared(exact, *again)
            kind = "equal in float64" if kind.startswith("equal") else kind
            what = f"{what} (in float64: {more})"
    return kind, what


def _by_the_page(table: str, kind: str, message: str, call: Call) -> tuple[str, str]:
    found = on_the_page(table, message)
    return (f"{kind}: {found}", message) if found is not None else ("not on the page", f"{kind}: {message}")


# What both give.


def compared(call: Call, ours: engine.Generation, theirs: Any) -> tuple[str, str]:
    draws = "do_sample=True" in " ".join([*call.setup, *(f"{name}={text}" for name, text in call.given.items())])
    sequences = theirs if isinstance(theirs, torch.Tensor) else theirs.sequences
    if call.drafts and draws:
        wrong = _drawn(ours, sequences) or ("" if sequences is theirs else compared_records(call, ours, theirs, True))
        return ("different", wrong) if wrong else ("equal: drawn with a draft", "")
    known = _sequences(call, ours, sequences)
    if known is None:
        return "different", f"sequences {ours.sequences.tolist()} where transformers has {sequences.tolist()}"
    if not isinstance(theirs, torch.Tensor):
        wrong = compared_records(call, ours, theirs, False, _mask_of_ids(call))
        if wrong:
            return "different", wrong
        if reads_all(ours) and (ours.hidden_states or ours.attentions):
            known = ", ".join(filter(None, [known, "states of whole texts"]))
    if call.turn is not None:
        found = _second_turn(call, ours, theirs)
        if found is not None:
            return found
    return f"equal: {known}" if known else "equal", ""


def _sequences(call: Call, ours: engine.Generation, theirs: torch.Tensor) -> str | None:
    """The case of the page by which they are the same, "" where there is no difference; None where they are not."""
    if ours.sequences.shape != theirs.shape:
        return None
    if torch.equal(ours.sequences, theirs):
        return ""
    lengths = torch.tensor([len(tokens) for tokens in ours.tokens])
    columns = torch.arange(theirs.shape[1]) - (theirs.shape[1] - _new_columns(ours))
    behind = columns[None] >= lengths[:, None]
    mine, other = ours.sequences.masked_fill(behind, 0), theirs.masked_fill(behind, 0)
    if not torch.equal(mine, other):
        return "texts of equal scores" if _differ_in_order(ours, mine, other) else None
    if ours.sequences_scores is not None:
        return "filled up with another id" if len(theirs[behind].unique()) == 1 else None
    reasons = {ours.finish_reasons[row] for row in behind.any(dim=1).nonzero().flatten().tolist()}
    return "rows that have ended are written on" if reasons <= {"criteria", "stop_string"} else None


def _differ_in_order(ours: engine.Generation, mine: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a search has the same texts on both sides, and only those that are next to equal scores change places."""
    if ours.sequences_scores is None:
        return False
    scores = ours.sequences_scores.tolist()
    groups = [list(rows) for _, rows in groupby(range(len(scores)), key=scores.__getitem__)]
    return all(sorted(mine[rows].tolist()) == sorted(other[rows].tolist()) for rows in groups)


def _drawn(ours: engine.Generation, theirs: torch.Tensor) -> str:
    """What differs of texts drawn in another order besides what was drawn: the prompts, rows, a length without end."""
    begun, mine = ours.sequences.shape[1] - _new_columns(ours), ours.sequences
    if len(mine) != len(theirs) or not torch.equal(mine[:, :begun], theirs[:, :begun]):
        return f"prompts {mine[:, :begun].tolist()} where transformers has {theirs[:, :begun].tolist()}"
    longest = set(ours.finish_reasons) == {"length"}
    if theirs.shape[1] <= begun or (longest and theirs.shape[1] > mine.shape[1]):
        return f"sequences {list(mine.shape)} where transformers has {list(theirs.shape)}"
    return ""


def _new_columns(ours: engine.Generation) -> int:
    return max(map(len, ours.tokens), default=0)


# A second turn on the caches of both.


def _pad(call: Call) -> int | None:
    """The pad id that the call or the model says."""
    pads = re.findall(r"\bpad_token_id=(\d+)", call.script())
    return int(pads[0]) if pads else None if call.setup else 0


def _second_turn(call: Call, ours: engine.Generation, theirs: Any) -> tuple[str, str] | None:
    if ours.cache is None or "inputs_embeds" in call.given or _new_columns(ours) == 0:
        return None
    names = _namespace(call)
    the, new = names["the"], eval(str(call.turn), names)
    prompts = len(new)
    new = new.repeat_interleave(max(1, len(ours.sequences) // prompts), dim=0)
    if len(new) != len(ours.sequences) or any(not tokens for tokens in ours.tokens):
        return None
    whole = torch.cat([ours.sequences, new], dim=1)
    mask = torch.ones_like(whole)
    begun = whole.shape[1] - new.shape[1] - _new_columns(ours)
    for row, tokens in enumerate(ours.tokens):
        mask[row, begun + len(tokens) : begun + _new_columns(ours)] = 0
    given: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
    if call.name in PAIRS:
        if not bool(mask.all()) or len(whole) != prompts or "attention_mask" not in call.given:
            return None  # what pads inside the decoder's text are is not said
        source = {name: eval(call.given[name], names) for name in _SOURCES if name in call.given}
        given |= source | {"decoder_input_ids": whole}
    else:
        first = _first_mask(call, names, whole[:, :begun])
        mask[:, :begun] = first.repeat_interleave(len(whole) // len(first), dim=0)
        given |= {"inputs": whole}
    try:
        mine = engine.generate(the, cache=ours.cache, **given).sequences
    except REFUSALS as error:
        kind, what = _by_the_page("Refused by kvengine", "second turn refused", str(error), call)
        return (kind, what) if kind == "not on the page" else None
    if call.name not in PAIRS:
        given |= {"attention_mask": mask}
    live = None if isinstance(theirs, torch.Tensor) else theirs.get("past_key_values")
    if isinstance(live, transformers.StaticCache):  # made as long as the first turn, which cuts its windows
        live = None
    if live is not None and call.name not in PAIRS and call.mode in ("greedy", "sample") and len(whole) == prompts:
        given |= {"past_key_values": live}
    try:
        other = transformers.GenerationMixin.generate(the, **given)
    except Exception:  # its cache has no room, or the model takes none
        given.pop("past_key_values", None)
        other = transformers.GenerationMixin.generate(the, **given)
    if not torch.equal(mine, other):
        return "different", f"second turn {mine.tolist()} where transformers has {other.tolist()}"
    return None


_SOURCES = ("inputs", "input_ids", "inputs_embeds", "encoder_outputs", "attention_mask")


def _mask_of_ids(call: Call) -> torch.Tensor | None:
    """Of the prompts [prompts, columns]; None where they are no ids of a decoder."""
    names = {"input_ids", "inputs"} & set(call.given)
    if call.name in PAIRS or not names:
        return None
    space = _namespace(call)
    return _first_mask(call, space, eval(call.given[names.pop()], space))


def _first_mask(call: Call, names: dict[str, Any], prompt: torch.Tensor) -> torch.Tensor:
    if "attention_mask" in call.given:
        return eval(call.given["attention_mask"], names)
    if not {"input_ids", "inputs"} & set(call.given):
        return torch.ones_like(prompt)
    pad = _pad(call)
    ends = re.findall(r"\beos_token_id=(\[[^]]*\]|\d+)", call.script())
    eos = eval(ends[0]) if ends else []
    if pad is None or pad in (eos if isinstance(eos, list) else [eos]):
        return torch.ones_like(prompt)
    return (prompt != pad).long()
