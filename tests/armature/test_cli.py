"""The command line: exit codes, errors and help."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from armature.cli import GROUPS, app
from armature.commands.arguments import Name
from tests.refusals import refused

REPOSITORY = Path(__file__).resolve().parents[2]


GPUS = {
    "train-vlm/colors": (0, None),
    "train-vlm/chartqa": (1, 24),
    "train-vlm/chartqa-7b": (1, 80),
    "train-vlm/molmo2": (4, None),
    "train-vla/molmoact2": (8, None),
}
"""GPUs that recipes name in their machine section, and the GiB of each one that their description names."""


def test_list_prints_json(tmp_path):
    command = [sys.executable, "-m", "armature", "list", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    by_name = {row["name"]: row for row in json.loads(done.stdout)}
    assert by_name["train-vlm/colors"]["pool"] == "cpu"
    assert by_name["train-vlm/qwen3-vl"]["pool"] == "train-gpu"
    assert {name: (by_name[name]["gpus"], by_name[name]["gpu_gib"]) for name in GPUS} == GPUS


def test_list_puts_recipes_under_the_gpus_that_they_need(armature):
    groups = [group.splitlines() for group in armature("list").stdout.strip().split("\n\n")]
    place = {line.split()[0]: number for number, group in enumerate(groups) for line in group[1:]}
    assert [place[name] for name in GPUS] == sorted({place[name] for name in GPUS}) and place["train-vlm/colors"] == 0


def test_help_shows_every_command_under_one_heading(armature):
    sections = dict(section.split(":\n", 1) for section in armature("--help").stdout.split("\n\n") if ":\n" in section)
    shown = [line.split()[0] for heading in GROUPS for line in sections[heading].splitlines() if line[2:3].strip()]
    assert sorted(shown) == sorted(get_command(app).commands)


@pytest.mark.parametrize("width", [60, 160])
def test_help_wraps_whole_sentences_at_the_width_of_the_terminal(armature, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    for arguments, sentence in ((["--help"], app_sentence("view")), (["run", "--help"], Name.__metadata__[0].help)):
        shown = armature(*arguments).stdout
        assert sentence in " ".join(shown.split())
        longest = max(map(len, shown.splitlines()))
        assert longest <= width and (longest > 80) == (width > 80)


def app_sentence(command):
    """Return the first sentence of a command's docstring, as one line."""
    return " ".join(get_command(app).commands[command].help.partition(".")[0].split())


@pytest.mark.parametrize(
    ("arguments", "code", "output"),
    [
        (["run", "train-vlm/colrs"], 2, "did you mean 'train-vlm/colors'"),
        (["run", "train-vlm/colors", "--set", "trainer.max_stepz=3"], 2, "did you mean 'max_steps'"),
        (["run", "train-vlm/colors", "--set", "rollouts.sampling.top_p=0.5"], 2, "top_p"),
        (["run", "train-vlm/colors", "--machine", "servers.count=0"], 2, "machine.servers.count"),
        (["stage", "taks", "--config", str(REPOSITORY / "configs/train-vlm/colors.toml")], 2, "did you mean 'tasks'"),
        (["check", "train-vlm/qwen3-vl", "--machine", f"servers.python={sys.executable}"], 2, "code: gpu_missing"),
        (["run", "train-vla/molmoact2"], 2, "armature run train-vla/tiny"),
        (["train-multimodal"], 2, "Usage: armature train-multimodal @ path/to/file.toml"),
        (["train-multimodal", "@", "missing.toml"], 2, "TOML config not found: "),
    ],
)
def test_invalid_input_is_an_error_without_traceback(arguments, code, output, armature):
    done = armature(*arguments)
    assert done.code == code, done.stderr
    assert output in done.stderr and "Traceback" not in done.stderr


def test_estimate_for_a_named_gpu_needs_none_here(armature):
    done = armature("check", "train-vlm/colors", "--machine", "trainer.gpus=[0]", "--gpu", "24GiB")
    assert done.code == 0 and "24.0 GiB" in done.stdout


@pytest.mark.parametrize("command", ["check", "run"])
@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (["--set", "environment.args.image_sise=3"], "did you mean 'image_size'"),
        (["--set", "model.source=tiny/qwen2vl"], "did you mean 'qwen2-vl'"),
        (["--set", "model.source=some/model", "--set", "model.tiny="], "set model.revision"),
        (["--set", "model.source=./nowhere", "--set", "model.tiny="], "no such model folder"),
        (["--set", "trainer.logprobs.name=triton"], "--set trainer.logprobs.name=torch"),
        (["--machine", "servers.python=nowhere"], "`armature setup`"),
        (["--machine", f"servers.python={sys.executable}"], "no Python interpreter with vLLM"),
        (["--machine", "trainer.gpus=[99]"], "code: gpu_missing"),
    ],
)
def test_late_failures_are_found_before_the_run_starts(command, arguments, output, armature, tmp_path):
    done = armature(command, "train-vlm/colors", *arguments)
    assert done.code in (1, 2) and output in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_version_equals_the_distribution(armature):
    from importlib.metadata import version

    done = armature("--version")
    assert done.code == 0 and done.stdout.startswith(f"armature {version('armature-vla')} ")


def test_shell_completes_commands_and_recipes(armature, monkeypatch):
    def completed(*words: str) -> list[str]:
        monkeypatch.setenv("COMP_WORDS", " ".join(words))
        monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
        return armature().stdout.split()

    monkeypatch.setenv("_ARMATURE_COMPLETE", "complete_bash")
    assert completed("armature", "dep") == ["deploy"]
    assert completed("armature", "run", "train-vlm/mot") == ["train-vlm/motion-tiny"]


@pytest.mark.parametrize(
    "name", ["evaluate/libero", "train-vla/tiny", "quantile-stats/libero", "alfworld-games/generated"]
)
def test_check_without_model_servers_needs_no_vllm(name, armature):
    done = armature(
        "check",
        name,
        "--configuration-only",
        "--machine",
        "servers.python=nowhere",
        "--machine",
        "trainer.gpus=[]",
    )
    assert done.code == 0 and "what the recipe names is there" in done.stdout


def test_stage_makes_artifact_once_and_links_it(tmp_path, armature):
    config = str(REPOSITORY / "configs/train-vlm/colors.toml")
    small = ["--set", "environment.train_tasks=8", "--set", "environment.heldout_tasks=8"]
    first = armature("stage", "tasks", "--config", config, "--out", "data/tasks", *small)
    assert first.code == 0, first.stderr
    digest = first.stdout.split()[-2]
    again = armature("stage", "tasks", "--config", config, "--out", "data/again", *small)
    assert again.stdout.split()[-2] == digest and "already made" in again.stdout + again.stderr
    made = tmp_path / "data/tasks/manifest.json"
    assert made.stat().st_nlink >= 3  # the store's and both links: nothing is stored twice
    missing = armature("stage", "evaluate", "--config", config, "--input", "tasks=data/tasks")
    assert missing.code == 2 and "['model', 'tasks'], given ['tasks']" in missing.stderr


def test_train_multimodal_reads_the_published_layout(tmp_path):
    from armature.train_multimodal import InferenceArgs, parse

    file = tmp_path / "vlm.toml"
    file.write_text(
        'model = "some/model"\n[env]\nid = "colors"\n[inference]\ngpus = 1\n'
        '[inference.args]\nenforce_eager = true\nmax_model_len = 8192\nlimit_mm_per_prompt = "image=4"\n'
        "[trainer]\ngpus = 1\n[trainer.args]\nmax_steps = 3\n"
    )
    layout = parse(["@", str(file)])
    assert layout.inference.args.images == 4 and layout.inference.args.model_extra == {"enforce_eager": True}
    assert InferenceArgs(limit_mm_per_prompt='{"image": 2}').images == 2
    file.write_text(file.read_text().replace("[trainer]", "[triner]"))
    with refused("extra_forbidden", "triner", "'trainer'"):
        parse(["@", str(file)])


@pytest.mark.parametrize("kind", ["file", "below a file", "link to itself", "no permission", "NUL", "too long"])
def test_unusable_store_is_an_error(tmp_path, kind, armature):
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "closed").mkdir(mode=0o500)
    path = {
        "file": "file",
        "below a file": "file/store",
        "link to itself": "loop",
        "no permission": "/sys/store" if os.geteuid() == 0 else "closed/store",  # root may write anywhere else
        "NUL": r"a\u0000b",
        "too long": "a" * 5000,
    }[kind]
    config = REPOSITORY / "configs/train-vlm/colors.toml"
    done = armature("stage", "tasks", "--config", str(config), "--machine", f'store="{path}"')
    assert done.code == 2 and "cannot be used as an artifact store" in done.stderr, done.stderr


def test_verify_names_damaged_artifacts(tmp_path, armature):
    config = str(REPOSITORY / "configs/train-vlm/colors.toml")
    small = ["--set", "environment.train_tasks=8", "--set", "environment.heldout_tasks=8"]
    made = armature("stage", "tasks", "--config", config, *small).stdout.split()[-1]
    done = armature("verify")
    assert done.code == 0 and "1 artifact is unchanged" in done.stdout
    (Path(made) / "preview.png").write_bytes(b"")
    for command in (["verify"], ["stage", "tasks", "--config", config, *small]):
        done = armature(*command)
        assert done.code == 1 and "preview.png" in done.stderr and "--force tasks" in done.stderr, done.stderr
    forced = armature("stage", "tasks", "--config", config, *small, "--force", "tasks")
    assert forced.code == 0 and "made again" in forced.stdout + forced.stderr, forced.stderr
    assert armature("verify").code == 0
    assert "did you mean 'tasks'" in armature("stage", "tasks", "--config", config, "--force", "task").stderr
    assert "code: store_missing" in armature("verify", "--store", "nowhere").stderr


def test_list_shows_recipes_beside_an_invalid_one(tmp_path, armature, monkeypatch):
    from armature.components import configuration

    shutil.copytree(REPOSITORY / "configs", tmp_path / "configs")
    broken = {
        "train-vlm/unknown": (b'extends = "colors.toml"\n[environment]\nname = "nobody-has-this"', "'nobody-has-this'"),
        "train-vlm/raises": (
            b'extends = "colors.toml"\n[environment]\nname = "own_raising:Shapes"',
            "RuntimeError: no",
        ),
        "train-vlm/installed": (b'extends = "colors.toml"\n[environment]\nname = "raising"', "SystemExit: no"),
        "train-vlm/no-toml": (b"[environment", "not valid TOML"),
        "train-vlm/no-text": (b"\xff\xfe", "not valid TOML"),
        "no-flow/mine": (b"", "no flow is called 'no-flow'"),
    }
    (tmp_path / "configs/no-flow").mkdir()
    (tmp_path / "own_raising.py").write_text("raise RuntimeError('no')\n")
    (tmp_path / "raising_lab.py").write_text("import sys\nsys.exit('no')\n")
    (tmp_path / "raising_lab-1.dist-info").mkdir()
    named = "[armature.environments]\nraising = raising_lab:Shapes\n"
    (tmp_path / "raising_lab-1.dist-info/entry_points.txt").write_text(named)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, (content, _) in broken.items():
        (tmp_path / f"configs/{name}.toml").write_bytes(content)
    monkeypatch.setattr(configuration, "CONFIGS", tmp_path / "configs")
    done = armature("list")
    assert done.code == 0 and "train-vlm/qwen3-vl" in done.stdout
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line}
    for name, (_, output) in broken.items():
        assert "cannot be used: " in lines[name] and output in lines[name]


@pytest.mark.parametrize(
    ("name", "value", "output"),
    [
        ("PREFECT_API_REQUEST_TIMEOUT", "soon", "PREFECT_API_REQUEST_TIMEOUT"),
        ("PREFECT_LOGGING_LEVEL", "LOUD", "PREFECT_LOGGING_LEVEL"),
        ("PREFECT_API_URL", "http://127.0.0.1:9/api", "Prefect's API does not answer"),
        ("PREFECT_API_URL", "no address", "Prefect's API does not answer"),
        ("PREFECT_SERVER_API_AUTH_STRING", "secret-without-a-user", "user:password"),
    ],
)
def test_invalid_prefect_variable_is_named(name, value, output, tmp_path):
    environment = {key: each for key, each in os.environ.items() if not key.startswith("PREFECT_")} | {name: value}
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    command = [sys.executable, "-m", "armature", "run", "train-vlm/colors"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode in (1, 2) and output in done.stderr, done.stderr[-2000:]
    assert "Traceback" not in done.stderr and "secret-without" not in done.stderr


@pytest.mark.parametrize("words", [("status",), ("down",), ("env",), ("up",), ("up", "-d"), ("show",)])
def test_uncreatable_folder_is_an_error(words, tmp_path, armature):
    (tmp_path / ".armature").write_text("in the way")
    done = armature(*words)
    assert done.code != 0 or words == ("down",)
    assert done.stderr.startswith("armature: ") or "no platform is running" in done.stdout


@pytest.mark.parametrize("damaged", [b"", b"{", b"[]", b"\xff\xfe", b'{"pid": 1}', b"null"])
def test_damaged_record_of_a_stopped_platform_is_ignored(damaged, tmp_path, armature):
    (tmp_path / ".armature").mkdir()
    for name in ("platform.json", "platform.lock"):
        (tmp_path / ".armature" / name).write_bytes(damaged)
    assert armature("status").code == 1
    assert "no platform is running" in armature("env").stderr
    assert armature("down").code == 0 and not (tmp_path / ".armature/platform.json").exists()


def test_port_of_a_foreign_process_is_refused_with_pid_and_command():
    from armature.services import refuse_taken_port

    with socket.socket() as foreign:
        foreign.bind(("127.0.0.1", 0))
        foreign.listen()
        with refused("port_in_use", f"process {os.getpid()}: ", sys.executable, "--prefect-server-port"):
            refuse_taken_port(foreign.getsockname()[1], "prefect-server")


@pytest.mark.parametrize(
    "damaged", [b"", b"armature:", b"one-word", b"\xff:\xff\xff\xff\xff\xff\xff\xff\xff", b"a:b c d e f g h"]
)
def test_damaged_password_is_an_error_that_hides_it(damaged, tmp_path, monkeypatch):
    from armature.services import auth_string

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PREFECT_SERVER_API_AUTH_STRING", raising=False)
    first = auth_string()
    assert auth_string() == first and (tmp_path / ".armature/prefect-auth-string").stat().st_mode & 0o777 == 0o600
    (tmp_path / ".armature/prefect-auth-string").write_bytes(damaged)
    with refused("invalid_auth_string", ".armature/prefect-auth-string") as caught:
        auth_string()
    assert "c d e f" not in caught.exconly()
