"""`make demo`: a talk with a chat model. Each question stands before its answer, on a terminal and in a file.

Arguments: the model, and the questions.
"""

from __future__ import annotations

import sys

from configs import EngineConfig
from engine.cli import output
from engine.cli.libraries import load_generator, start_libraries
from engine.cli.progress import Work


def main(model: str, *questions: str) -> None:
    with Work() as work:
        start_libraries(work, model)
        chat = load_generator(work, model, EngineConfig()).chat(do_sample=False, max_new_tokens=80)
    for question in questions:
        output.say(f"> {question}")
        output.say_pieces(chunk.text or "" for chunk in chat.stream(question))
    assert chat.last is not None
    output.say(f"\n{chat.last.stats}")


if __name__ == "__main__":
    main(*sys.argv[1:])
