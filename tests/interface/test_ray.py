"""`engine.distributed.Predictor`: batches of columns through the queue, alone and in actors of Ray Data."""

import ast
import os
import subprocess
import sys

import numpy as np
import pytest
from architectures import tiny_model
from killed_actor import Killed
from places import ROOT

import engine
from engine.distributed import Predictor

PROMPTS = [f"def function_{number}(a, b):\n" for number in range(24)]


def column(values):
    found = np.empty(len(values), dtype=object)
    found[:] = values
    return found


@pytest.fixture(scope="module")
def expected():
    gen = engine.Generator(engine.SHIPPED_MODEL)
    return [gen.generate(prompt, max_new_tokens=8) for prompt in PROMPTS]


def test_columns_in_and_out(expected):
    predict = Predictor(engine.SHIPPED_MODEL, slots=4, max_new_tokens=8)
    found = predict({"number": np.arange(24), "prompt": column(PROMPTS)})
    assert list(found) == ["number", "prompt", "text", "finish_reason", "new_tokens", "error"]
    assert found["number"].tolist() == list(range(24))
    assert found["text"].tolist() == [out.text[0] for out in expected]
    assert found["finish_reason"].tolist() == [out.finish_reasons[0] for out in expected]
    assert found["new_tokens"].tolist() == [out.stats.new_tokens for out in expected]
    assert found["error"].tolist() == [None] * 24


def test_parameters_of_rows_and_errors(expected):
    predict = Predictor(engine.SHIPPED_MODEL, prompt="question", max_new_tokens=8)
    own = [None, {"max_new_tokens": 3}, {"temperature": -1}, {"do_sample": True, "seed": 1, "num_return_sequences": 2}]
    ids = np.array(predict._generator.tokenizer(PROMPTS[0])["input_ids"])
    found = predict({"question": column([ids, *PROMPTS[1:4]]), "parameters": column(own)})
    assert found["text"][0] == expected[0].text[0]
    assert found["new_tokens"].tolist()[:3] == [8, 3, 0]
    assert "temperature" in found["error"][2]
    assert found["text"][2] is None
    assert len(found["text"][3]) == len(found["finish_reason"][3]) == 2


def test_texts_of_numpy_rows_without_a_prompt_and_no_rows(expected):
    predict = Predictor(engine.SHIPPED_MODEL, max_new_tokens=8)
    found = predict({"prompt": np.array(PROMPTS[:2])})
    assert found["text"].tolist() == [out.text[0] for out in expected[:2]]
    found = predict({"prompt": column([None, PROMPTS[0], None])})
    assert found["text"].tolist() == [None, expected[0].text[0], None]
    assert [error is None for error in found["error"]] == [False, True, False]
    assert "no prompt" in found["error"][0]
    found = predict({"prompt": column([])})
    assert [len(values) for values in found.values()] == [0] * 5


def test_a_model_without_a_tokenizer():
    predict = Predictor(tiny_model("llama"), max_new_tokens=4)
    found = predict({"prompt": np.array([[5, 6, 7], [8, 9, 10]])})
    assert found["text"].tolist() == [None, None]
    assert found["new_tokens"].tolist() == [4, 4]


@pytest.mark.parametrize("batch", [{"text": ["x"]}, {"prompt": ["x"], "text": ["y"]}])
def test_wrong_columns(batch):
    with pytest.raises(engine.OptionError, match="column"):
        Predictor(tiny_model("llama"))(batch)


@pytest.fixture(scope="module")
def ray():
    ray = pytest.importorskip("ray", reason="the extra ray is not installed")
    pytest.importorskip("pyarrow")
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
    environment = {"env_vars": {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}}
    # Two for the actors, and some for the tasks that deal out the rows.
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    yield ray
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dies", [pytest.param(False, marks=pytest.mark.product), True])
def test_actors_of_ray(ray, expected, tmp_path, dies):
    """Every row comes once, with the text of one process, also when an actor is killed."""
    import ray.data

    rows = ray.data.from_items([{"number": number, "prompt": prompt} for number, prompt in enumerate(PROMPTS)])
    marker = tmp_path / "killed"
    own = {"marker": str(marker)} if dies else {}
    found = (
        rows.repartition(6)
        .map_batches(
            Killed if dies else Predictor,
            fn_constructor_args=[str(engine.SHIPPED_MODEL)],
            fn_constructor_kwargs={"max_new_tokens": 8} | own,
            compute=ray.data.ActorPoolStrategy(size=2),
            batch_size=4,
            num_cpus=1,
        )
        .take_all()
    )
    assert marker.exists() == dies
    assert sorted(row["number"] for row in found) == list(range(24))
    for row in found:
        assert row["text"] == expected[row["number"]].text[0]
        assert row["error"] is None


@pytest.mark.slow
def test_the_deployment_of_the_guide(tmp_path):
    """Two replicas behind one address."""
    page = (ROOT / "docs" / "guide" / "several-processes.md").read_text()
    [program] = [block for block in page.split("```text\n") if "serve.deployment" in block]
    program = program.partition("```")[0].replace("num_cpus=4", "num_cpus=4, include_dashboard=False")
    asked = (
        "import httpx\n"
        "body = {'model': 'shipped', 'prompt': 'def main():', 'max_tokens': 8, 'temperature': 0}\n"
        "for _ in range(4):\n"
        "    print(httpx.post('http://127.0.0.1:8000/v1/completions', json=body, timeout=60).json())\n"
        "serve.shutdown()\n"
    )
    (tmp_path / "deployment.py").write_text(program + asked)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, tmp_path / "deployment.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    answers = [ast.literal_eval(line) for line in done.stdout.splitlines() if line.startswith("{")]
    expected = engine.generate(engine.SHIPPED_MODEL, "def main():", max_new_tokens=8, do_sample=False).text
    assert [answer["choices"][0]["text"] for answer in answers] == expected * 4, done.stderr
