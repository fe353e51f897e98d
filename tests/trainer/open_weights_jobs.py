"""Jobs for ranks: models that scripts load before, after and without training arguments."""

from __future__ import annotations

import copy
import os
import socket
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.harness import tiny


def training_arguments(output_dir: str, layout: Mapping[str, Any] | None = None, **changed: Any) -> Any:
    from paddleformers_fc import FlexTrainingArguments

    settings = {"cls": FlexTrainingArguments, "flex_checkpoint": True, **changed}
    return tiny.training_arguments(layout or tiny.SINGLE.to_json(), output_dir, **settings)


def configured(layout: Mapping[str, Any], args: Any, source: str, **changed: Any) -> Any:
    """The configuration of a directory for a layout, as PaddleFormers' command line makes it."""
    from paddleformers.transformers import AutoConfig

    config = AutoConfig.from_pretrained(source, dtype="float32")
    wanted = tiny.layout_from(layout)
    config.tensor_model_parallel_size = wanted.tp
    config.tensor_parallel_rank = config.tensor_model_parallel_rank = args.tensor_parallel_rank
    config.pipeline_model_parallel_size = wanted.pp
    config.virtual_pipeline_model_parallel_size = wanted.vpp
    config.expert_model_parallel_size = 1
    config.fuse_rms_norm = False
    config.seq_length = config.max_sequence_length = tiny.SEQUENCE
    config._attn_implementation = "sdpa"
    if config.model_type == "ernie4_5_moe":
        config.moe_group, config.moe_use_aux_free = "dummy", False
    for name, value in changed.items():
        setattr(config, name, value)
    return config


def load_and_export(
    layout: Mapping[str, Any], output_dir: str, source: str, target: str, model: Mapping[str, Any] | None = None
) -> list[str]:
    """``from_pretrained`` under a layout, and an export of what it made; what it logged as a warning on this rank."""
    from paddleformers.transformers import AutoModelForCausalLM, AutoModelForCausalLMPipe
    from paddleformers.utils.log import logger

    from paddleformers_fc.distributed.channel import job_channel
    from paddleformers_fc.execute.live_export import save_weights
    from paddleformers_fc.trainer import documents, live_roles
    from paddleformers_fc.trainer.description import describe_model

    args = training_arguments(output_dir, layout)
    kind = AutoModelForCausalLMPipe if layout.get("pp", 1) > 1 else AutoModelForCausalLM
    warnings: list[str] = []
    warning = logger.warning
    logger.warning = warnings.append
    built = kind.from_pretrained(source, config=configured(layout, args, source, **(model or {})))
    logger.warning = warning
    channel = job_channel()
    files = {"config.json": documents.config_text(built).encode()} if channel.rank == 0 else {}
    weights = live_roles.model_roles(built)["model_state"]
    save_weights(weights, describe_model(built), files, Path(target), 10**9, channel)
    return [line for line in warnings if str(source) in line]


def _from_pretrained(source: str) -> Any:
    from paddleformers.transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(source, dtype="float32")


def _fresh(source: str) -> Any:
    from paddleformers.transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(source)
    config.fuse_rms_norm = False
    return AutoModelForCausalLM.from_config(config, dtype="float32")


def load_beside_stock(output_dir: str, source: str) -> dict[str, Any]:
    """The weights and the next random numbers after a load by PaddleFormers and by us, from the same seed."""
    import paddle

    found: dict[str, Any] = {}
    for way in ("stock", "ours"):
        if way == "ours":
            training_arguments(output_dir)
        paddle.seed(7)
        model = _from_pretrained(source)
        found[way] = [_bits(model), paddle.rand([4]).tolist()]
    return {"equal": found["stock"] == found["ours"], "initial": _bits(_fresh(source)) != found["ours"][0]}


def _bits(model: Any) -> dict[str, str]:
    return {name: one.numpy().tobytes().hex() for name, one in model.state_dict().items()}


def _imported(source: str, output_dir: str) -> Any:
    import paddleformers_fc

    _ = paddleformers_fc.FlexTrainer
    return _from_pretrained(source)


def _installed(source: str, output_dir: str) -> Any:
    from paddleformers_fc import install

    install()
    return _from_pretrained(source)


def _after_arguments(source: str, output_dir: str) -> Any:
    training_arguments(output_dir)
    return _from_pretrained(source)


def _filled_again(source: str, output_dir: str) -> Any:
    from paddleformers_fc import load_open_weights

    model = _imported(source, output_dir)
    load_open_weights(model, source)
    return model


def _part_of_another(source: str, output_dir: str) -> Any:
    from paddleformers.transformers import LlamaForCausalLM

    inner = _imported(source, output_dir)

    class Wrapper(LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.wrapped = inner

    return Wrapper(inner.config)


def _copied(source: str, output_dir: str) -> Any:
    return copy.deepcopy(_imported(source, output_dir))


def _set_by_hand(source: str, output_dir: str) -> Any:
    model = _after_arguments(source, output_dir)
    model.set_state_dict({name: one * 2 for name, one in model.state_dict().items()})
    return model


def _fresh_after_import(source: str, output_dir: str) -> Any:
    import paddleformers_fc

    _ = paddleformers_fc.FlexTrainer
    return _fresh(source)


def _fresh_with_values(source: str, output_dir: str) -> Any:
    model = _fresh_after_import(source, output_dir)
    for parameter in model.parameters():
        parameter.set_value(parameter * 0.5)
    return model


WAYS: dict[str, Callable[[str, str], Any]] = {
    one.__name__.lstrip("_"): one
    for one in (
        _imported,
        _installed,
        _after_arguments,
        _filled_again,
        _copied,
        _part_of_another,
        _set_by_hand,
        _fresh_after_import,
        _fresh_with_values,
    )
}
"""How a script comes by its model."""


def train_model_of(
    way: str, source: str, output_dir: str, trainer: str = "FlexTrainer", **arguments: Any
) -> dict[str, Any]:
    """Train two steps with a model that a script has come by in one of :data:`WAYS`; the losses, or the error."""
    try:
        model = WAYS[way](source, output_dir)
        return {"losses": _trained(model, output_dir, trainer, **arguments).losses}
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)}


def train_where_one_rank_differs(source: str, output_dir: str) -> str:
    """Data parallel, where a script lets one rank alone load its weights; the error, on every rank."""
    import paddle.distributed as dist

    from paddleformers_fc import FlexTrainer
    from paddleformers_fc.trainer import models

    args = training_arguments(output_dir, tiny.DP2.to_json())
    model = _fresh(source)
    if dist.get_rank() == 1:
        models.note_unverified(model, "a loader")
    try:
        tiny.trainer(model, args, cls=FlexTrainer)
    except Exception as error:
        return str(error)
    return ""


def _trained(model: Any, output_dir: str, trainer: str, **arguments: Any) -> Any:
    from paddleformers.trainer import Trainer

    from paddleformers_fc import FlexTrainer, install

    if trainer == "Trainer":
        install()
    args = training_arguments(output_dir, max_steps=2, **arguments)
    made = tiny.trainer(model, args, cls={"FlexTrainer": FlexTrainer, "Trainer": Trainer}[trainer])
    made.train()
    return made


def train_beside_reference(source: str, output_dir: str, change: str | None, verified: bool) -> dict[str, Any]:
    """Train with a reference model; the last step, or the error.

    Args:
        change: a parameter of the reference model that is another one's.
        verified: whether the reference model was read from files; otherwise it was copied with ``set_state_dict``.
    """
    from paddleformers_fc import FlexTrainer

    args = training_arguments(output_dir, max_steps=1)
    model, reference = _from_pretrained(source), _from_pretrained(source) if verified else _fresh(source)
    if not verified:
        reference.set_state_dict(model.state_dict())
    if change is not None:
        parameter = dict(reference.named_parameters())[change]
        parameter.set_value(parameter + 1)
    trainer = tiny.trainer(model, args, cls=FlexTrainer)
    trainer.ref_model = reference
    try:
        trainer.train()
        return {"step": trainer.state.global_step}
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)}


def load_by_name(source: str, output_dir: str, home: str, hub: str, cache: str) -> dict[str, bool]:
    """Load a model by its name: of PaddleFormers' home directory, and of a hub that answers on this machine."""
    from huggingface_hub import constants, hf_api

    # The client reads these from the environment when it is imported, which the fork server has done.
    constants.HUGGINGFACE_CO_URL_TEMPLATE = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub)
    constants.ENDPOINT, constants.HF_HUB_CACHE, hf_api.api.endpoint = hub, cache, hub
    expected = _bits(_from_pretrained(source))
    training_arguments(output_dir)
    (Path(home) / "owner").mkdir(parents=True)
    (Path(home) / "owner/model").symlink_to(source)
    os.environ["PF_HOME"] = home
    found = {"home": _bits(_from_pretrained("owner/model")) == expected}
    del os.environ["PF_HOME"]
    found["hub"] = _bits(_from_pretrained("someone/model")) == expected
    return found


def serve_as_hub(directory: Path) -> ThreadingHTTPServer:
    """A server that answers as a hub of Hugging Face does for one model, ``someone/model``."""

    class Hub(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(False)

        def do_GET(self) -> None:
            self._answer(True)

        def _answer(self, with_body: bool) -> None:
            prefix = "/someone/model/resolve/main/"
            path = directory / self.path.removeprefix(prefix)
            there = self.path.startswith(prefix) and path.is_file()
            data = path.read_bytes() if there else b""
            self.send_response(200 if there else 404)
            if there:
                self.send_header("ETag", f'"{len(data):040x}"')
                self.send_header("X-Repo-Commit", "0" * 40)
            else:
                self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if with_body:
                self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    assert isinstance(server.socket, socket.socket)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def bytes_read(source: str, output_dir: str, layout: Mapping[str, Any], way: str) -> int:
    """How many bytes of files this rank asked the system for while it loaded a model."""
    from paddleformers.transformers import AutoModelForCausalLM

    # Blocks are not compared: the file is one block, which a rank would read as a whole.
    args = training_arguments(output_dir, layout, flex_read=way, flex_verify="off")
    config = configured(layout, args, source)
    before = _asked()
    AutoModelForCausalLM.from_pretrained(source, config=config)
    return _asked() - before


def _asked() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def convert_from_pdparams(source: str, directory: str, converted: str, output_dir: str) -> dict[str, Any]:
    """Weights in PaddleFormers' own format are refused, and read after the conversion in the error."""
    import paddle
    from paddleformers.transformers import AutoModelForCausalLM

    model = _from_pretrained(source)
    Path(directory).mkdir()
    paddle.save(model.state_dict(), str(Path(directory) / "model_state.pdparams"))
    model.config.save_pretrained(directory)
    expected = _bits(model)
    again = AutoModelForCausalLM.from_pretrained(directory, load_checkpoint_format="", convert_from_hf=False)
    again.save_pretrained(converted)
    training_arguments(output_dir)
    try:
        _from_pretrained(directory)
        message = ""
    except Exception as error:
        message = str(error)
    return {"message": message, "equal": _bits(_from_pretrained(converted)) == expected}
