"""`engine generate --image`, with a tiny model that sees, its tokenizer and its processor in a folder."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from multimodal import MULTIMODAL
from transformers import AutoModelForImageTextToText, AutoTokenizer, BatchFeature, LlavaConfig

import engine
from engine.loading import images
from engine.prompt import EncodedPrompt

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
needs_pillow = pytest.mark.skipif(find_spec("PIL") is None, reason="images are read with Pillow")


@pytest.fixture(scope="module")
def sees(tmp_path_factory):
    """The folder of a model that reads texts and images."""
    folder, tokenizer = tmp_path_factory.mktemp("sees"), AutoTokenizer.from_pretrained(engine.SHIPPED_MODEL)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.chat_template = TEMPLATE
    config = dict(MULTIMODAL["llava"][0])
    config["text_config"] = config["text_config"] | {"vocab_size": len(tokenizer), "tie_word_embeddings": True}
    image = tokenizer.convert_tokens_to_ids("<image>")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(LlavaConfig(**config | {"image_token_index": image})).eval()
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                torch.nn.init.normal_(parameter, std=0.3)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_model_that_sees_answers_texts_too(cli, sees):
    expected = engine.generate(sees, [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], max_new_tokens=4)
    done = cli(["generate", "hi", "--model", str(sees), "-n", "4", "--json"])
    assert json.loads(done.stdout)["rows"][0]["tokens"] == expected.tokens[0]


class Processor:
    """As processors are called, with pixels that follow from the images' names."""

    image_processor, chat_template = object(), TEMPLATE

    def __init__(self, folder):
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def __call__(self, text, images, return_tensors):
        ids = self.tokenizer(text.replace("<image>", "<image>" * 4), return_tensors=return_tensors)
        seeds = [torch.Generator().manual_seed(len(image)) for image in images]
        pixels = [torch.rand(3, 8, 8, dtype=torch.float64, generator=seed) for seed in seeds]
        return BatchFeature({**ids, "pixel_values": torch.stack(pixels)})

    def apply_chat_template(self, messages, **options):
        assert options.pop("tokenize")
        assert options.pop("return_dict")
        tensors = options.pop("return_tensors")
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, **options)
        seen = [part["image"] for message in messages for part in message["content"] if part["type"] == "image"]
        return self(text, seen, tensors)


def test_images_come_before_the_text_as_the_processor_writes_them(cli, sees, monkeypatch):
    monkeypatch.setattr(images, "find_spec", lambda name: name)
    monkeypatch.setattr(images.AutoProcessor, "from_pretrained", lambda folder, **_: Processor(folder))
    monkeypatch.setattr(images, "_read", lambda path: path.name)
    gen = engine.Generator(sees)
    assert type(gen.model).__name__ == "LlavaForConditionalGeneration"
    text = "<system>Be brief.<user><image><image>hi<assistant>"
    inputs = Processor(sees)(text, ["a.png", "bb.png"], "pt")
    inputs["pixel_values"] = inputs["pixel_values"].float()
    expected = gen.generate(EncodedPrompt(inputs["input_ids"], is_chat=True) | inputs, max_new_tokens=6)
    words = ["generate", "--model", str(sees), "-n", "6", "--json"]
    done = cli([*words, "hi", "--system", "Be brief.", "--image", "a.png", "--image", "bb.png"])
    assert json.loads(done.stdout)["rows"][0]["tokens"] == expected.tokens[0]
    other = cli([*words, "hi", "--system", "Be brief.", "--image", "a.png", "--image", "b.png"])
    assert json.loads(other.stdout)["rows"] != json.loads(done.stdout)["rows"]
    read = images.read_prompt(Processor(sees), text, [Path("a.png"), Path("bb.png")], torch.bfloat16)
    assert (read["pixel_values"].dtype, read["input_ids"].dtype) == (torch.bfloat16, torch.long)
    plain = cli([*words, text, "--raw", "--image", "a.png", "--image", "bb.png"])
    assert json.loads(plain.stdout)["rows"] == json.loads(done.stdout)["rows"]


def test_what_images_need(cli, tmp_path, monkeypatch):
    words = ["generate", "hi", "--image", str(tmp_path / "x.png")]
    monkeypatch.setattr(images, "find_spec", lambda name: None)
    assert "Pillow, which is not installed: pip install pillow" in cli(words).stderr
    monkeypatch.setattr(images, "find_spec", lambda name: name)
    done = cli(words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "takes no images: leave them out, or choose a model that does" in done.stderr


@needs_pillow
def test_images_from_files(cli, sees, tmp_path):
    from PIL import Image
    from transformers import CLIPImageProcessor, LlavaProcessor

    processor = LlavaProcessor(
        CLIPImageProcessor(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8}),
        AutoTokenizer.from_pretrained(sees),
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )
    processor.save_pretrained(sees)
    path, wrong = tmp_path / "red.png", tmp_path / "text.png"
    Image.new("RGB", (16, 16), "red").save(path)
    wrong.write_text("no image")
    content = [{"type": "image", "path": str(path)}, {"type": "text", "text": "hi"}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    expected = engine.generate(sees, inputs, max_new_tokens=6, eos_token_id=[])
    words = ["generate", "hi", "--model", str(sees), "-n", "6", "--json", "--set", "eos_token_id=[]"]
    done = cli([*words, "--image", str(path)])
    assert json.loads(done.stdout)["rows"][0]["tokens"] == expected.tokens[0], done.stderr
    assert "is no image that Pillow reads" in cli([*words, "--image", str(wrong)]).stderr
    assert cli([*words, "--image", str(tmp_path / "nowhere.png")]).exit_code == 2
