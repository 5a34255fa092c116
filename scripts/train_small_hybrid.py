"""Makes a small model of the Qwen3.5 architecture with an MTP block, from open text: weights that mean something.

`corpus` gathers text (this Python's standard library, questions and answers of GSM8K's training part) and trains a
byte-level tokenizer on it; `train` trains the model, lets it write, trains the MTP block on that, and saves both.

    python scripts/train_small_hybrid.py corpus --data ../shared/data --out DIR
    python scripts/train_small_hybrid.py train --corpus DIR --out DIR --seconds 60,25

With `--full-attention-every 1` and no seconds for the block it is a model of attention layers only, which can draft for
others: the draft of another vocabulary in the matrix.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from localspec.storage.safetensors import SafetensorsFile
from localspec.training.answers import Answer, AnswerStore, BatchPlan
from localspec.training.export import drafter_tensors
from localspec.training.hybrid import HybridModule, HybridTarget, new_hybrid, save_hybrid
from localspec.training.mtp import TrainableMtp
from localspec.training.trainer import Trainer, TrainPlan

VOCAB_SIZE = 4096
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MAX_CODE_BYTES = 10 << 20
HELD_OUT_SHARE = 0.02
WINDOW = 512
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "tie_word_embeddings": True,
    "text_config": {
        "model_type": "qwen3_5_text",
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 6,
        "full_attention_interval": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "vocab_size": VOCAB_SIZE,
        "num_token_ids": VOCAB_SIZE,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
        "attention_bias": False,
        "mtp_num_hidden_layers": 1,
        "eos_token_id": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    },
}


def corpus(chosen: argparse.Namespace) -> None:
    """tokens.bin (uint16), tokenizer.json and tokenizer_config.json."""
    chance = random.Random(chosen.seed)
    texts = [
        f"<|im_start|>user\n{row['question']}<|im_end|>\n<|im_start|>assistant\n{row['answer']}<|im_end|>\n"
        for row in map(json.loads, (chosen.data / "gsm8k_train.jsonl").read_text(encoding="utf-8").splitlines())
    ]
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    paths = [path for path in paths if not {"site-packages", "test", "tests", "idlelib"} & set(path.parts)]
    chance.shuffle(paths)
    size = 0
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if size < MAX_CODE_BYTES:
            size += len(text)
            texts += [text[begin : begin + 6000] + "<|endoftext|>" for begin in range(0, len(text), 6000)]
    chance.shuffle(texts)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=list(SPECIAL), initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    chosen.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(chosen.out / "tokenizer.json"))
    settings = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2], "pad_token": SPECIAL[2], "chat_template": TEMPLATE}
    (chosen.out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    ids = [each.ids for each in tokenizer.encode_batch(texts)]
    np.concatenate([np.asarray(each, dtype=np.uint16) for each in ids]).tofile(chosen.out / "tokens.bin")
    print(json.dumps({"texts": len(texts), "tokens": sum(map(len, ids)), "code_bytes": size}))


def train(chosen: argparse.Namespace) -> None:
    begun = time.monotonic()
    device = torch.device(chosen.device)
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
    tokens = torch.from_numpy(np.fromfile(chosen.corpus / "tokens.bin", dtype=np.uint16).astype(np.int64))
    split = int(len(tokens) * (1 - HELD_OUT_SHARE))
    seconds = [float(part) for part in chosen.seconds.split(",")]
    config = {
        **CONFIG,
        "text_config": {**CONFIG["text_config"], "full_attention_interval": chosen.full_attention_every},
    }
    module = new_hybrid(config, chosen.seed).to(device)
    report: dict[str, Any] = {"seed": chosen.seed, "corpus_tokens": len(tokens), "torch": torch.__version__}
    report["model"] = train_model(module, tokens[:split].to(device), tokens[split:].to(device), seconds[0], chosen)
    # What is saved is BF16: the block is trained on those values.
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if not name.endswith(("A_log", "dt_bias")):
                parameter.copy_(parameter.to(torch.bfloat16))
    block = train_block(module, config, (tokens, split), chosen, report) if seconds[1] or chosen.steps else None
    report["seconds"] = round(time.monotonic() - begun, 1)
    save_hybrid(module, config, chosen.out, drafter_tensors(block, "bf16") if block else {})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(chosen.corpus / name, chosen.out / name)
    (chosen.out / "report.json").write_text(json.dumps(report, indent=1))
    with SafetensorsFile.open(chosen.out / "model.safetensors") as file:
        print(json.dumps({"tensors": len(file.entries), "seconds": report["seconds"]}), flush=True)


def train_block(
    module: HybridModule,
    config: dict[str, Any],
    text: tuple[torch.Tensor, int],
    chosen: argparse.Namespace,
    report: dict[str, Any],
) -> TrainableMtp:
    """The block, on what the model writes. text: tokens, and where those begin that are kept back."""
    device, begun = torch.device(chosen.device), time.monotonic()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = HybridTarget(module, device, dtype)
    store = write(target, *text, chosen)
    print(f"[{time.monotonic() - begun:.1f} s] {len(store)} texts for the block", flush=True)
    block = TrainableMtp(config, target, chosen.seed)
    plan = TrainPlan(chosen.steps, BatchPlan(16384, 256, chosen.seed), measure_every=200, save_every=1 << 30)
    trainer = Trainer(block, target, store, plan, chosen.work)
    if not chosen.steps:
        seconds = float(chosen.seconds.split(",")[1])
        steps = max(20, int(seconds / trainer.seconds_a_step()))
        trainer.plan = TrainPlan(steps, plan.batches, measure_every=200, save_every=1 << 30)
    curve = trainer.run(lambda line: print(f"mtp: {line}", flush=True))
    report["mtp"] = {"steps": trainer.plan.steps, "length": curve[-1].length, "rates": curve[-1].rates}
    report["mtp"]["curve"] = [(point.step, point.loss, point.length) for point in curve]
    report["parameters"] = sum(each.numel() for each in (*module.parameters(), *block.module.parameters()))
    return block


def train_model(
    module: torch.nn.Module, text: torch.Tensor, held_out: torch.Tensor, seconds: float, chosen: argparse.Namespace
) -> dict[str, Any]:
    """Next-token training on windows at random places; steps come from the seconds unless they are given."""
    device = text.device
    optimiser = torch.optim.AdamW(module.parameters(), lr=1.0, betas=(0.9, 0.95), fused=device.type == "cuda")
    generator = torch.Generator().manual_seed(chosen.seed)
    steps, began, curve = chosen.steps or 1 << 30, 0.0, []
    step = 0
    while step < steps:
        if step == 15 and not chosen.steps:
            began = time.perf_counter()
        if step == 30 and not chosen.steps:
            # The schedule needs the number of steps; until it is known the rate is still warming up.
            steps = max(60, int(seconds / ((time.perf_counter() - began) / 15)))
        warm = min(1.0, (step + 1) / 60)
        share = step / steps
        for group in optimiser.param_groups:
            group["lr"] = chosen.rate * warm * (0.03 + 0.97 * (1 + math.cos(math.pi * share)) / 2)
        places = torch.randint(0, len(text) - WINDOW - 1, (chosen.windows,), generator=generator)
        loss = model_loss(module, text, places)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimiser.step()
        step += 1
        if step % 200 == 0 or step == steps or step in (15, 30):
            curve.append((step, round(float(loss), 4)))
            print(f"model: step {step}/{steps}, loss {curve[-1][1]}", flush=True)
    with torch.no_grad():
        places = torch.arange(0, len(held_out) - WINDOW - 1, WINDOW)[: chosen.windows]
        found = float(model_loss(module, held_out, places))
    print(f"model: held-out loss {found:.3f}", flush=True)
    return {"steps": steps, "windows": chosen.windows, "held_out_loss": round(found, 4), "curve": curve}


def model_loss(module: Any, text: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    offsets = torch.arange(WINDOW + 1, device=text.device)
    windows = text[places.to(text.device)[:, None] + offsets]
    with torch.autocast(text.device.type, dtype=torch.bfloat16, enabled=text.device.type == "cuda"):
        final = module.run(windows[:, :-1]).final
        logits = module.head.multiply(final)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


def write(target: HybridTarget, tokens: torch.Tensor, split: int, chosen: argparse.Namespace) -> AnswerStore:
    """Text windows as they are, and greedy continuations; those of the text that was kept back are held out."""
    store = AnswerStore(chosen.work / "answers")
    generator = torch.Generator().manual_seed(chosen.seed + 1)
    places = torch.randint(0, split - 256, (chosen.texts,), generator=generator).tolist()
    store.append([Answer(tokens[place : place + 256].tolist(), 1, greedy=False) for place in places])
    for begin, end, count in ((0, split, chosen.texts // 4), (split, len(tokens), chosen.texts // 32)):
        size = min(256, max(8, count))
        for _ in range(-(-count // size)):
            places = torch.randint(begin, end - 64, (size,), generator=generator)
            prompts = tokens[places[:, None] + torch.arange(48)].to(target.device)
            with torch.autocast(target.device.type, dtype=torch.bfloat16, enabled=target.device.type == "cuda"):
                found = target.go_on(prompts, 80).tolist()
            store.append([Answer(ids, 48, held_out=begin > 0) for ids in found])
    return store


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("stage", choices=("corpus", "train"))
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("small_hybrid_work"))
    parser.add_argument("--seconds", default="60,25", help="Of the model and of its block.")
    parser.add_argument("--steps", type=int, default=0, help="Of both, instead of seconds.")
    parser.add_argument("--full-attention-every", type=int, default=3, help="Layers; 1: no recurrent layer.")
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--texts", type=int, default=16384)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=9)
    chosen = parser.parse_args()
    torch.manual_seed(chosen.seed)
    chosen.out.mkdir(parents=True, exist_ok=True)
    (corpus if chosen.stage == "corpus" else train)(chosen)


if __name__ == "__main__":
    main()
