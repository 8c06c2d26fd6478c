"""Train the small Llama that ships in the package, on the source of Python's standard library.

    python benchmarks/train_shipped_model.py --out engine/shipped --steps 2000

Everything is seeded: the same Python release, torch release, thread count and `--steps` give the same weights. The run
checkpoints to `--work` every 100 steps and resumes from there. At the end it writes a transformers folder (float16
safetensors, fast tokenizer) and reports bits per byte on the held-out modules, next to what `xz -9e` needs for them.
"""

from __future__ import annotations

import json
import lzma
import math
import platform
import sysconfig
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HELD_OUT = (
    "heapq.py",
    "textwrap.py",
    "shlex.py",
    "csv.py",
    "fractions.py",
    "sched.py",
    "queue.py",
    "bisect.py",
    "json/decoder.py",
    "json/encoder.py",
    "email/header.py",
    "http/cookies.py",
    "graphlib.py",
    "zipapp.py",
)
SKIPPED_FOLDERS = {"test", "tests", "site-packages", "idlelib", "lib2to3", "turtledemo", "__pycache__"}
END_OF_TEXT, PAD = "<|endoftext|>", "<|pad|>"
VOCABULARY = 4096
STDLIB = Path(sysconfig.get_path("stdlib"))
CHAT_TEMPLATE = (  # it continues code: a message is the next lines, and an answer goes on with them
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] != 'user' %}{{ '\\n' }}{% endif %}{% endfor %}"
)
BATCH_TOKENS = 4096


def corpus(stdlib: Path) -> tuple[list[str], list[str]]:
    """The texts to train on and the held-out ones, in a fixed order."""
    train, held_out = [], []
    for path in sorted(stdlib.rglob("*.py")):
        relative = path.relative_to(stdlib)
        if SKIPPED_FOLDERS & set(relative.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        (held_out if relative.as_posix() in HELD_OUT else train).append(text)
    return train, held_out


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE: every text can be written with it, nothing is unknown."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=[END_OF_TEXT, PAD],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """All texts as one row of ids, an end-of-text token before each."""
    ids = [token for text in texts for token in [tokenizer.eos_token_id, *tokenizer(text)["input_ids"]]]
    return torch.tensor(ids)


def new_model() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=704,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=1,
        )
    )


def bits_per_byte(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> float:
    """Every byte of `texts` predicted once, with up to 1024 tokens before it, 512 at least once there are so many."""
    nats, window, stride = 0.0, 1024, 512
    model.eval()
    with torch.inference_mode():
        for text in texts:
            ids = encode(tokenizer, [text])
            done = 1
            while done < len(ids):
                begin = max(0, done - stride)
                piece = ids[begin : begin + window][None]
                logits = model(piece).logits[0, done - begin - 1 : -1]
                nats += torch.nn.functional.cross_entropy(
                    logits.float(), piece[0, done - begin :], reduction="sum"
                ).item()
                done = begin + piece.shape[1]
    model.train()
    return nats / math.log(2) / sum(len(text.encode()) for text in texts)


def optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=2e-2, weight_decay=0.05, momentum=0.95),
        torch.optim.AdamW(rest, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def main(
    out: Annotated[Path, typer.Option(help="folder to write the model to")],
    steps: Annotated[int, typer.Option(help="optimizer steps of 4096 tokens")] = 2000,
    work: Annotated[Path, typer.Option(help="folder for checkpoints")] = Path(".train"),
    stdlib: Annotated[Path, typer.Option(help="the standard library's folder")] = STDLIB,
    device: str = "cpu",
) -> None:
    torch.manual_seed(0)
    work.mkdir(parents=True, exist_ok=True)
    train_texts, held_out_texts = corpus(stdlib)
    tokenizer = train_tokenizer(train_texts)
    ids = encode(tokenizer, train_texts)
    held_out_text = "".join(held_out_texts).encode()
    print(
        f"{sum(map(len, train_texts)) / 1e6:.1f} MB in {len(train_texts)} files, {len(ids) / 1e6:.2f}M tokens; "
        f"held out: {len(held_out_text) / 1e3:.0f} kB"
    )

    model = new_model().to(device)
    optimizer_list = optimizers(model)
    base_rates = [group["lr"] for o in optimizer_list for group in o.param_groups]
    begin, log = 0, []
    checkpoint = work / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizer_list, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        begin, log = state["step"], state["log"]
        print(f"resumed at step {begin}")

    started = time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        bar = progress.add_task("training", total=steps, completed=begin)
        for step in range(begin, steps):
            # The last fifth reads long pieces, so that the 2048 positions the configuration announces are trained.
            columns_per_row = 512 if step < 0.8 * steps else 2048
            draw = torch.Generator().manual_seed(step)
            starts = torch.randint(len(ids) - columns_per_row, (BATCH_TOKENS // columns_per_row,), generator=draw)
            batch = torch.stack([ids[s : s + columns_per_row] for s in starts.tolist()]).to(device)
            scale = min(1.0, (step + 1) / 50, max(0.02, (steps - step) / (0.5 * steps)))
            with torch.autocast(device, torch.bfloat16):
                loss = model(batch, labels=batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            rates = iter(base_rates)
            for optimizer in optimizer_list:
                for group in optimizer.param_groups:
                    group["lr"] = next(rates) * scale
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            speed = (step + 1 - begin) * BATCH_TOKENS / (time.perf_counter() - started)
            progress.update(bar, advance=1, description=f"loss {loss.item():.3f}, {speed:,.0f} tokens/s")
            if (step + 1) % 100 == 0 or step + 1 == steps:
                log.append({"step": step + 1, "loss": round(loss.item(), 4)})
                state = {
                    "model": model.state_dict(),
                    "optimizers": [o.state_dict() for o in optimizer_list],
                    "step": step + 1,
                    "log": log,
                }
                torch.save(state, checkpoint)
                print(json.dumps(log[-1] | {"tokens_per_s": round(speed)}), flush=True)

    # Measured as shipped: weights rounded to float16, computed in float32.
    model.to("cpu", torch.float16)
    model.generation_config.update(bos_token_id=0, eos_token_id=0, pad_token_id=1, do_sample=False)
    model.save_pretrained(out)
    config = json.loads((out / "config.json").read_text())
    config["dtype"] = "float32"  # float16 is how the file is written, not how a CPU should compute
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tokenizer.save_pretrained(out)
    report = {
        "held_out_bits_per_byte": round(bits_per_byte(model.float().cpu(), tokenizer, held_out_texts), 4),
        "held_out_bytes": len(held_out_text),
        "xz_bits_per_byte": round(
            8 * len(lzma.compress(held_out_text, preset=9 | lzma.PRESET_EXTREME)) / len(held_out_text), 4
        ),
        "steps": steps,
        "trained_tokens": steps * BATCH_TOKENS,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "log": log,
    }
    (out / "training.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report | {"log": None}))


if __name__ == "__main__":
    typer.run(main)
