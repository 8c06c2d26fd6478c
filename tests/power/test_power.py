"""The default tests can fail: whatever part of a step's bookkeeping is put off by one, some of them do.

Every case names a damage (tests/support/damage.py) and those of the default tests that have to notice it, by files and
a `-k` expression. They run in a fork of this process, with the damage applied, until the first of them fails.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from places import ROOT

EQUAL = "tests/parity/test_equivalence.py"
BACK = "tests/contract/test_rollback.py"
CONTRACT = "tests/contract/test_contract.py"
WALK = "tests/contract/test_contract_walk.py"
ENCODER = "tests/parity/test_encoder_decoder.py"
CASES = [
    ("shift_growing_write", EQUAL, "llama and dynamic"),
    ("shift_write_index", EQUAL, "llama and static"),
    ("shift_mask", EQUAL, "llama and dynamic"),
    ("shift_mask", EQUAL, "llama and static"),
    ("shift_mask", EQUAL, "llama and none"),
    ("shift_step_mask", EQUAL, "llama and dynamic"),
    ("shift_step_mask", EQUAL, "qwen3 and static"),
    ("shift_decode_positions", EQUAL, "llama and dynamic"),
    ("shift_decode_positions", EQUAL, "gpt2 and static"),
    ("shift_mask_sizes", EQUAL, "mistral and dynamic"),
    ("shift_mask_sizes", EQUAL, "gemma2 and static"),
    ("keep_one_column_less", EQUAL, "mistral and dynamic"),
    ("keep_one_column_less", EQUAL, "llama4_text and static"),
    ("compact_one_off", EQUAL, "mistral and dynamic"),
    ("compact_one_off", EQUAL, "qwen3 and static"),
    ("shift_what_a_convolution_reads", EQUAL, "lfm2 and dynamic"),
    ("shift_what_a_convolution_reads", EQUAL, "mamba2 and static"),
    ("keep_states_as_they_were", EQUAL, "mamba and mamba"),
    ("keep_states_as_they_were", EQUAL, "falcon_h1 and static"),
    ("forget_states", EQUAL, "bamba and dynamic"),
    ("forget_states", EQUAL, "qwen3_next and static"),
    ("read_pads_into_states", EQUAL, "mamba2 and dynamic"),
    ("read_pads_into_states", EQUAL, "lfm2 and static"),
    ("shift_growing_write", ENCODER, "bart"),
    ("read_the_encoder_of_another_row", ENCODER, "bart"),
    ("keep_what_was_dropped", BACK, "llama"),
    ("take_back_one_too_few", CONTRACT, "cropping"),
    ("take_back_what_was_overwritten", CONTRACT, "cropping"),
    ("leave_rows_where_they_are", CONTRACT, "test_rows and static"),
    ("fork_rows_in_turn", CONTRACT, "test_a_fork"),
    ("forget_no_staged_columns", WALK, "offloaded"),
    ("encode_one_column_early", "tests/contract/test_quantized.py", "any_sequence or text_equals"),
    ("turn_sinks_too_far", "tests/unit/test_sink_steps.py", "sinks"),
    ("hand_over_one_token_more", "tests/contract/test_contract_copies.py", "conversion"),
    ("accept_every_proposal", "tests/parity/test_assisted.py", "every_kind"),
    ("keep_the_worst_beams", "tests/parity/test_beams.py", "every_two"),
    ("show_half_stop_strings", "tests/unit/test_text.py", "stop"),
    ("leave_streams_where_they_are", "tests/interface/test_streams.py", "test_a_stream_is"),
]


def outcome(damage: str | None, file: str, expression: str, shown: Path) -> tuple[int, str]:
    """How a run of these default tests ends, and what it shows."""
    asked = ["-x", "-q", "-p", "no:cacheprovider", "-k", expression, str(ROOT / file)]
    child = os.fork()
    if child == 0:  # everything is imported there, and what transformers says is known
        code = -1
        try:
            with shown.open("w") as out:
                os.dup2(out.fileno(), 1)
                os.dup2(out.fileno(), 2)
                sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
                code = pytest.main([*asked, *(["--damage", damage] if damage else [])])
                sys.stdout.flush()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), shown.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("damage", "file", "expression"), CASES)
def test_the_default_tests_notice(damage, file, expression, tmp_path):
    code, shown = outcome(damage, file, expression, tmp_path / "shown")
    assert code == pytest.ExitCode.TESTS_FAILED, shown


@pytest.mark.parametrize("file", [EQUAL, ENCODER])
def test_without_damage_they_pass(file, tmp_path):
    code, shown = outcome(None, file, "(llama or bart) and static", tmp_path / "shown")
    assert code == pytest.ExitCode.OK, shown
