"""Files of examples/cluster: configs parse, scripts are shell, Kubernetes' schemas accept the manifests; one is run."""

import argparse
import re
import runpy
import shlex
import subprocess

import kubernetes_validate
import pytest
import yaml
from torch.distributed.run import get_args_parser

from lightning_megatron_rl.serve.command import make_parser
from tests.command_line import ROOT, build

FOLDER = ROOT / "examples" / "cluster"
PAGE = (ROOT / "docs" / "servers.md").read_text()
MANIFESTS = list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text()))


@pytest.mark.parametrize(("config", "overlay"), [("sft", "two_nodes"), ("grpo", "servers"), ("grpo", "ray_engines")])
def test_overlays_are_configs(config, overlay, capsys):
    files = ["--config", f"configs/demo/{config}.yaml", "--config", f"{FOLDER}/{overlay}.yaml"]
    with pytest.raises(SystemExit) as exit_:
        build("fit", *files, "--print_config")
    assert exit_.value.code == 0
    assert yaml.safe_load(capsys.readouterr().out)["model"]["class_path"]


@pytest.mark.parametrize("name", ["torchrun.sh", "slurm.sbatch"])
def test_scripts_are_shell(name):
    subprocess.run(["bash", "-n", str(FOLDER / name)], check=True)


def test_torchrun_takes_the_options_of_the_script():
    text = (FOLDER / "torchrun.sh").read_text().replace("\\\n", " ")
    (line,) = [line for line in text.splitlines() if line.startswith("exec torchrun")]
    values = {"$NODES": "2", "${DEVICES:-1}": "1", "$RENDEZVOUS": "a:1", "${JOB:-train}": "x", "${RESTARTS:-0}": "0"}
    words = [values.get(word, word) for word in shlex.split(line)[2:]]
    parsed: argparse.Namespace = get_args_parser().parse_args(words)
    assert (parsed.nnodes, parsed.nproc_per_node, parsed.training_script) == ("2", "1", "lightning-megatron-rl")


def test_command_of_the_script_for_ray_parses():
    script = runpy.run_path(str(FOLDER / "ray_train.py"))
    (line,) = re.findall(r"ray_train\.py (.* -- .*)", script["__doc__"].replace("\\\n", " "))
    options = script["make_parser"]().parse_args(shlex.split(line))
    assert (options.num_nodes, options.devices, options.arguments[0]) == (2, 1, "fit")
    for path in options.arguments[2::2]:
        assert (ROOT / path).is_file()


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda manifest: manifest["kind"])
def test_manifests_fit_the_schemas_of_kubernetes(manifest):
    kubernetes_validate.validate(manifest, "1.32", strict=True)


def test_files_of_the_job_are_in_the_image():
    (job,) = [manifest for manifest in MANIFESTS if manifest["kind"] == "Job"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    steps = re.findall(r"^(WORKDIR|COPY) (.*)", (ROOT / "docker" / "gpu.Dockerfile").read_text(), re.MULTILINE)
    (project,) = [place for (_, place), after in zip(steps, steps[2:], strict=False) if after == ("COPY", ". .")]
    paths = [container["command"][0], *container["args"][1::2]]
    for path in paths:
        # the package brings configs, and finds them from any directory
        assert path.startswith(f"{project}/") or path.startswith("configs/"), f"{path} is not below {project}"
        assert (ROOT / path.removeprefix(f"{project}/")).is_file()


def test_a_wrong_manifest_does_not():
    (job,) = [manifest for manifest in MANIFESTS if manifest["kind"] == "Job"]
    wrong = {**job, "spec": {**job["spec"], "completion": 2}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.32", strict=True)


def test_commands_of_the_page_parse():
    lines = [line for block in re.findall(r"^```bash\n(.*?)^```", PAGE, re.M | re.S) for line in block.splitlines()]
    served = [shlex.split(line)[2:] for line in lines if line.startswith("lightning-megatron-rl serve ")]
    assert served  # the page's other commands: tests/test_docs.py
    for arguments in served:
        assert make_parser().parse_args(arguments).model
