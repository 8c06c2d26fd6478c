"""The table of parameters: Python, the command line and a request take the same values and refuse the same ones."""

import ast

import pytest
import typer
from places import ROOT

pytest.importorskip("pydantic", reason="the extra serve is not installed")

from pydantic import ValidationError

import engine
from engine.cli.main import app
from engine.cli.values import generation_parameters
from engine.parameters import PARAMETERS
from engine.request.call import read
from engine.server.bodies import ChatRequest

COMMAND = typer.main.get_command(app).commands["generate"]
NUMBERS = [name for name, row in PARAMETERS.items() if row.reader and row.reader.scalar in (int, float)]
# A right and a wrong value of those that are no numbers and have an option or a field.
OTHERS = {
    "strategy": ("beam", 5),
    "early_stopping": ("never", "soon"),
    "stop_strings": (["x"], 5),
    "response_format": ({"type": "text"}, 5),
    "json_schema": ({"type": "object"}, 5),
    "regex": ("a+", 5),
    "choices": (["a", "b"], []),
    "grammar": ('start: "a"', 5),
    **dict.fromkeys(("continue_final_message", "add_generation_prompt", "sanitize_control_tokens"), (True, "soon")),
}
# Of these a command line and a request have other forms than Python, or the value is checked with the model.
IN_OTHER_FORMS = {"cache", "assistant_model", "do_sample", "sequence_bias"}


def by_command_line(name, value):
    """The parameter as the library gets it. Raises `typer.BadParameter`."""
    words = [f"--{name.replace('_', '-')}={each}" for each in (value if isinstance(value, list) else [value])]
    return generation_parameters(COMMAND.make_context("generate", [*words, "x"]).params)[name]


def by_request(name, value):
    """The parameter as a request has it. Raises `ValidationError`."""
    field = PARAMETERS[name].field
    given = {field.name: value} if field.name else {"engine": {name: value}}
    body = ChatRequest.model_validate({"model": "m", "messages": [{"role": "user"}], "logprobs": True} | given)
    return getattr(body, field.name) if field.name else getattr(body.engine, name)


def ways(name):
    """How a parameter can be given, and what is raised where its value is wrong."""
    yield read, engine.OptionError
    if PARAMETERS[name].flag is not None and name not in OTHERS:
        yield by_command_line, typer.BadParameter
    if PARAMETERS[name].field is not None:
        yield by_request, ValidationError


def check(name, right, wrong):
    for give, error in ways(name):
        for value in right:
            assert give(name, value) == value
        for value in wrong:
            with pytest.raises(error):
                give(name, value)


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_has_one_range(name):
    reader = PARAMETERS[name].reader
    ends = [end for end in (reader.least, reader.most) if end is not None and abs(end) < 2**65]
    beyond = [end + (1 if end is reader.most else -1) for end in ends]
    check(name, [1, *ends] if reader.scalar is int else [0.5], ["x", "nan", *beyond])


@pytest.mark.parametrize("name", OTHERS)
def test_other_values_are_the_same(name):
    right, wrong = OTHERS[name]
    check(name, [right], [wrong])
    if PARAMETERS[name].flag is not None and name != "json_schema":  # which a file has
        assert by_command_line(name, right) == right


def test_no_parameter_is_left_out():
    given = {name for name, row in PARAMETERS.items() if row.flag or row.field}
    assert given - {*NUMBERS, *OTHERS} == IN_OTHER_FORMS


def beyond_a_request():
    """Numbers that the server does not read, whatever Python does."""
    for name in NUMBERS:
        if (field := PARAMETERS[name].field) is not None:
            ends = (field.least and field.least - 0.005, field.most and field.most + 1)
            yield from ((name, value) for value in ends if value is not None)


@pytest.mark.parametrize(("name", "value"), list(beyond_a_request()))
def test_a_server_may_read_less(name, value):
    with pytest.raises(ValidationError):
        by_request(name, value)


# Where a name of the table is declared once more: what is declared there.
ELSEWHERE = {
    "engine/cli/options.py": {
        "cache", "do_sample", "max_new_tokens", "num_beams", "num_return_sequences",  # of `engine plan`
        "on_oom",  # of EngineConfig
        "max_time",  # of the server
    },
    "engine/server/bodies.py": {
        # OpenAI's fields, with ranges of the table.
        "temperature", "top_p", "seed", "top_logprobs", "response_format",
        "continue_final_message", "add_generation_prompt", "sanitize_control_tokens",
        "cache_config",  # with the options that a request may set
    },
    "engine/request/call.py": {"generation_config"},  # the reader that reads the fields of one
    "engine/__init__.py": set(),
    "engine/generator.py": {"cache", "cache_config"},  # of methods that take some of them
}  # fmt: skip


def declared(source):
    """Keys of tables, annotated fields of classes, and annotated keywords of functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            yield from (ast.literal_eval(key) for key, value in pairs
                        if isinstance(key, ast.Constant) and isinstance(value, ast.Call | ast.Attribute))  # fmt: skip
        elif isinstance(node, ast.ClassDef):
            yield from (field.target.id for field in node.body if isinstance(field, ast.AnnAssign))
        elif isinstance(node, ast.FunctionDef):
            yield from (keyword.arg for keyword in node.args.kwonlyargs if keyword.annotation is not None)


@pytest.mark.parametrize("file", ELSEWHERE)
def test_a_parameter_is_declared_once(file):
    assert set(declared((ROOT / file).read_text())) & PARAMETERS.keys() == ELSEWHERE[file]
