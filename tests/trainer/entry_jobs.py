"""The stock Trainer, scripts and the stock command line: jobs of the fork server."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.harness import tiny


def methods() -> dict[str, int]:
    from paddle.nn import Layer
    from paddleformers.peft import LoRAModel
    from paddleformers.trainer import PdArgumentParser, Trainer, TrainingArguments
    from paddleformers.transformers import PretrainedModel

    owners = (Trainer, PdArgumentParser, TrainingArguments, PretrainedModel, LoRAModel, Layer)
    return {f"{owner.__name__}.{name}": id(value) for owner in owners for name, value in vars(owner).items()}


def replaced_methods() -> dict[str, list[str]]:
    """Which methods of PaddleFormers are others after importing, installing and detaching."""
    before = methods()

    def changed() -> list[str]:
        return sorted(name for name, value in methods().items() if before.get(name) != value)

    from paddleformers_fc.trainer import entry

    found = {"imported": changed()}
    entry.install()
    entry.install()
    found["installed"] = changed()
    entry.detach()
    found["detached"] = changed()
    return found


def run_native(way: str, output_dir: str, layout: Mapping[str, Any]) -> dict[str, Any]:
    """Train without ``flex_checkpoint``: with the stock Trainer alone, through our subclass, or installed."""
    from paddleformers.trainer import Trainer, TrainingArguments

    from paddleformers_fc import FlexTrainer, FlexTrainingArguments, install

    if way == "installed":
        install()
    classes = {
        "stock": (TrainingArguments, Trainer),
        "installed": (FlexTrainingArguments, Trainer),
        "subclass": (FlexTrainingArguments, FlexTrainer),
    }
    arguments, cls = classes[way]
    args = tiny.training_arguments(layout, output_dir, cls=arguments, max_steps=4, save_steps=1, save_total_limit=2)
    trainer = tiny.trainer(tiny.build("llama", layout, args), args, cls=cls)
    trainer.train()
    trainer.save_model(str(Path(output_dir) / "final"))
    files = sorted(path.relative_to(output_dir).as_posix() for path in Path(output_dir).rglob("*") if path.is_file())
    return {"losses": trainer.losses, "files": [name for name in files if not name.startswith("runs/")]}


def write_corpus(directory: str, text: str) -> None:
    """A tokenizer trained on a text, a tiny Llama for it, and the text's paragraphs as training data."""
    from paddleformers.transformers import LlamaForCausalLM
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    root = Path(directory)
    passage = Path(text).read_text()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=384, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(passage.splitlines(), trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    )
    wrapped.save_pretrained(str(root / "model"))
    config = tiny.config("llama", vocab_size=384, max_position_embeddings=128, pad_token_id=2)
    LlamaForCausalLM(config).save_pretrained(str(root / "model"))
    paragraphs = [" ".join(part.split()) for part in passage.split("\n\n") if len(part) > 80]
    (root / "train.jsonl").write_text("".join(json.dumps({"text": [part]}) + "\n" for part in paragraphs))


def run_script(script: str, arguments: Sequence[str]) -> None:
    """Run a script as an interpreter does, in a process that has imported Paddle."""
    import runpy
    import sys

    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def missing_names(names: Sequence[str]) -> dict[str, str]:
    """Evaluate dotted names after ``import paddleformers_fc`` alone; the errors."""
    import paddleformers_fc

    errors = {}
    for name in names:
        try:
            eval(name, {"paddleformers_fc": paddleformers_fc})
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"
    return errors


def run_command_line(yaml: str) -> None:
    """What ``paddleformers-cli train`` runs in each of its workers."""
    import sys

    from paddleformers.cli import launcher

    sys.argv = ["launcher.py", "train", yaml]
    launcher.launch()


def registered_after_another(also: str) -> dict[str, Any]:
    """Run the registration file as the stock command line does, with another file that runs first."""
    import os

    from paddleformers.cli.hparams import parser
    from paddleformers.trainer import Trainer

    from paddleformers_fc.trainer import register

    os.environ[register.ALSO_RUN] = also
    native = Trainer.__init__
    parser._load_custom_template(str(register.PATH))
    name, seen = Trainer.own_registration()
    return {"name": name, "theirs": seen is native, "ours": Trainer.__init__ is not native}


def stock_names() -> list[str]:
    """Every key of PaddleFormers' command line, of its argument classes."""
    import dataclasses

    from paddleformers.cli.hparams import parser

    return [field.name for kind in parser._TRAIN_ARGS for field in dataclasses.fields(kind)]


def stock_enumerations(output_dir: str) -> dict[str, list[str]]:
    """The keys whose values PaddleFormers converts to members of enumerations, with all values of each."""
    from enum import Enum

    from paddleformers.trainer import TrainingArguments
    from paddleformers.trainer.trainer_utils import ShardingOption

    arguments = TrainingArguments(output_dir=output_dir, device="cpu", amp_master_grad=False)
    kinds = {key: type(value) for key, value in vars(arguments).items() if isinstance(value, Enum)}
    # One process has no sharding.
    return {key: [one.value for one in kind] for key, kind in {**kinds, "sharding": ShardingOption}.items()}
