"""What docs/reference/differences.md says of messages and cases is in the code."""

from pathlib import Path

import pytest
import random_outcomes
from random_outcomes import PAGE, literals, on_the_page, told
from transformers import GenerationConfig

from engine.request.inputs import checks

REFUSED = [row.beginning for row in told() if row.table == "Refused by kvengine"]
REASONS = checks._CHANGE_THE_TEXT | {name: f": {reason}" for name, reason in checks._REMEDIES.items()}
NAMES = {f"{name}=" for name in GenerationConfig().to_dict()} | {"speculation_type="}  # which came after 5.17
CASES = [row.beginning for row in told() if row.table == "Other texts"]


@pytest.mark.parametrize("beginning", REFUSED)
def test_a_message_is_one_of_the_codes(beginning):
    parts = [part for part in beginning.split("...") if any(character.isalpha() for character in part)]
    parts = [part for part in parts if part not in NAMES]  # filled in while it runs
    assert parts
    for part in parts:
        assert part in literals(), f"{part!r} is in no text of the code"


def test_every_parameter_that_may_not_apply_is_told_by_its_name():
    """No row is for any parameter: it would excuse those that are left out of the list by mistake."""
    of_strategies = {"num_beams"}  # refused beside `strategy` alone
    for name in GenerationConfig().to_dict():
        reason = REASONS.get(name, "")
        reason = reason if name in checks._CHANGE_THE_TEXT else "greedy has no use for it" + reason
        said = on_the_page("Refused by kvengine", f"{name}=5 cannot apply: {reason}")
        applies = name in checks._ALWAYS_APPLY | checks.SAMPLING | of_strategies or name.startswith("_")
        assert (said is None) == applies, name
        said = on_the_page("Refused by kvengine", f"{name}=5 applies to sampling, but greedy draws nothing: give")
        assert (said is None) == (name not in checks.SAMPLING), name


def test_the_cases_are_those_that_random_calls_know():
    source = Path(random_outcomes.__file__).read_text()
    assert len(CASES) > 5
    for case in CASES:
        assert f'"{case}' in source or f'"equal: {case}' in source, case


def test_every_row_has_a_message():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    rows = [line for line in rows if not line.startswith(("|---", "| the error", "| case"))]
    assert len(rows) > 50
    assert all(line.startswith("| `") for line in rows)


def test_a_message_is_matched_from_its_beginning_by_the_longest():
    message = "num_assistant_tokens=3 cannot apply: greedy has no use for it: it is for assistant_model"
    assert on_the_page("Refused by kvengine", message).endswith("it is for assistant_model")
    assert on_the_page("Refused by kvengine", "and " + message.replace("=", "")) is None
    assert on_the_page("Refused by transformers", message) is None
