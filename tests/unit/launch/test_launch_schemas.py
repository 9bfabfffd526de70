"""``configs/launch``: the launch scripts' manifests, against the schemas of KubeRay, Kubernetes and SkyPilot.

The schemas contain only the fields that are used here, copied from their sources, and reject any other.
"""

import re
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml
from support.launch_machine import ALL_BUT_THE_JOB, IMAGE, LAUNCH, OVERRIDES, SECRET, Machine, job_of

from verl_precision.paths import REPO
from verl_precision.run.train import GAVE_UP

CONFIGS = REPO / "configs/launch"
# Every knob that becomes part of a job, with values that a careless manifest would misparse.
KNOBS = IMAGE | {"EXPERIMENT": "arithmetic", "PRECISION": "bf16", "RECIPE": "flowrl", "STEPS": 9, "SEED": 7}
KNOBS |= {"MODEL": "owner/it's: a #model", "OUT": "/shared/o${NNODES}ut", "NNODES": 3, "GPUS_PER_NODE": 4}
KNOBS |= {"CPUS": 32, "MEMORY": "512Gi", "HEAD_CPUS": 2, "HEAD_MEMORY": "8Gi"}
KNOBS |= {"HF_TOKEN": SECRET, "WANDB_API_KEY": SECRET}


def schema(of: object) -> dict:
    """Return the JSON schema of a class, a pattern of quantities, a set of values, a list of one type, or a tuple of
    possible types; of a dict of fields, required where the name ends in "!", or of any names, ``{str: type}``."""
    if isinstance(of, re.Pattern):
        return {"type": ["integer", "string"], "pattern": of.pattern}
    if isinstance(of, set):
        return {"enum": sorted(of)}
    if isinstance(of, list):
        return {"type": "array", "items": schema(of[0]), "minItems": 1}
    if isinstance(of, tuple):
        return {"oneOf": [schema(each) for each in of]}
    if isinstance(of, dict) and str in of:
        return {"type": "object", "additionalProperties": schema(of[str])}
    if isinstance(of, dict):
        properties = {name.rstrip("!"): schema(value) for name, value in of.items()}
        required = [name.rstrip("!") for name in of if name.endswith("!")]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"type": {str: "string", bool: "boolean", int: "integer"}[of]}


# Kubernetes v1: a quantity is a whole number or a string of this form (the CRD's own pattern).
NUMBER = r"(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))"
QUANTITY = re.compile(rf"^(\+|-)?{NUMBER}(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?{NUMBER}))?$")
SECRET_KEY = {"secretKeyRef": {"name": str, "key!": str, "optional": bool}}
CONTAINER = {
    "name!": str,
    "image!": str,
    "env": [({"name!": str, "value!": str}, {"name!": str, "valueFrom!": SECRET_KEY})],
    "resources": {"requests": {str: QUANTITY}, "limits": {str: QUANTITY}},
    "volumeMounts": [{"name!": str, "mountPath!": str}],
}
CLAIM = {"name!": str, "persistentVolumeClaim!": {"claimName!": str}}
EMPTY = {"name!": str, "emptyDir!": {"medium": {"", "Memory"}, "sizeLimit": QUANTITY}}
PODS = {
    "rayStartParams!": {str: str},
    "template!": {"spec!": {"containers!": [CONTAINER], "volumes": [(CLAIM, EMPTY)]}},
}
# KubeRay's ray.io/v1: ray-operator/apis/ray/v1/rayjob_types.go at 0057210 and raycluster_types.go at 026f143 of
# ray-project/kuberay, from which ray.io_rayjobs.yaml is generated. Its reference for 1.7.1 has the same fields.
RAYJOB = {
    "apiVersion!": {"ray.io/v1"},
    "kind!": {"RayJob"},
    "metadata!": {"generateName!": str, "namespace": str},
    "spec!": {
        "entrypoint!": str,
        "submissionMode": {"K8sJobMode", "HTTPMode", "InteractiveMode"},
        "backoffLimit": int,
        "shutdownAfterJobFinishes": bool,
        "ttlSecondsAfterFinished": int,
        "rayClusterSpec!": {
            "headGroupSpec!": PODS | {"serviceType": {"ClusterIP", "NodePort", "LoadBalancer"}},
            "workerGroupSpecs": [PODS | {"groupName!": str, "replicas": int, "minReplicas!": int, "maxReplicas!": int}],
        },
    },
}
# SkyPilot 0.14.1: sky/utils/schemas.py, get_task_schema and get_resources_schema.
RECOVERY = {"strategy": str, "max_restarts_on_errors": int, "recover_on_exit_codes": [int]}
TASK = {
    "name": str,
    "num_nodes": int,
    "resources": {"accelerators": str, "image_id": str, "job_recovery": RECOVERY},
    "volumes": {str: str},
    "envs": {str: str},
    "run": str,
}


def check(document: dict, of: dict) -> None:
    """Validate a document; prove that the schema rejects other fields."""
    jsonschema.validate(document, schema(of))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document | {"nodes": 2}, schema(of))


@pytest.fixture(scope="module")
def rayjob(tmp_path_factory) -> dict:
    """The manifest that ``kuberay.sh`` passes to kubectl."""
    machine = Machine(tmp_path_factory.mktemp("kuberay"))
    machine.program("kubectl", f"cat > {machine.folder}/manifest.yaml")
    done = machine.succeed("kuberay.sh", *OVERRIDES, **KNOBS)
    assert machine.words("kubectl") == ["create", "-f", "-"]
    manifest = (machine.folder / "manifest.yaml").read_text()
    dry = machine.succeed("kuberay.sh", "--dry-run", *OVERRIDES, **KNOBS)
    assert dry.stdout == manifest, "a dry run shows what would be created"
    assert SECRET not in manifest + done.stdout + done.stderr
    return yaml.safe_load(manifest)


def knobs() -> list[str]:
    """Return the names of the variables that make a job, as knobs.sh reads them."""
    script = f'source {LAUNCH}/knobs.sh; read_variables; echo "${{job[@]}}"'
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split()


def pods(rayjob: dict) -> list[dict]:
    cluster = rayjob["spec"]["rayClusterSpec"]
    return [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def test_rayjob_has_the_fields_of_kuberay_and_requests_what_the_knobs_set(rayjob):
    check(rayjob, RAYJOB)
    assert rayjob["spec"]["shutdownAfterJobFinishes"], "or the GPUs stay reserved, by default"
    for pod in pods(rayjob):
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == volumes
        assert pod["containers"][0]["image"] == IMAGE["IMAGE"]
    (workers,) = rayjob["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == 3
    assert workers["rayStartParams"] == {"num-gpus": "4"}
    head, worker = (pod["containers"][0]["resources"] for pod in pods(rayjob))
    assert worker["requests"] == worker["limits"] == {"cpu": "32", "memory": "512Gi", "nvidia.com/gpu": 4}
    assert head["requests"] == head["limits"] == {"cpu": "2", "memory": "8Gi"}
    head_group = rayjob["spec"]["rayClusterSpec"]["headGroupSpec"]
    assert head_group["serviceType"] == "ClusterIP", "the dashboard, open to the pods, stays within the cluster"
    assert head_group["rayStartParams"]["num-cpus"] == head_group["rayStartParams"]["num-gpus"] == "0", "only run"


def test_environment_of_the_pod_becomes_the_job(rayjob, machine):
    """The RayJob's entrypoint runs on the head's pod, with its environment and the RAY_ADDRESS that Ray gives a job."""
    machine.program("python3", ALL_BUT_THE_JOB)
    environment, of_workers = (pod["containers"][0].get("env") for pod in pods(rayjob))
    assert of_workers == environment, "a worker loads the model and logs as the head does"
    plain = {each["name"]: each["value"] for each in environment if "value" in each}
    secret = {each["name"]: each["valueFrom"]["secretKeyRef"] for each in environment if "valueFrom" in each}
    for name in ("HF_TOKEN", "WANDB_API_KEY"):
        assert secret.pop(name) == {"name": "verl-precision", "key": name, "optional": True}
    assert not secret
    assert {*plain} == {*knobs(), "HF_HOME"}, "an omitted knob would silently have its default"
    assert rayjob["spec"]["entrypoint"] == "/opt/verl-precision/scripts/launch/train.sh"
    check_the_job(machine, "train.sh", plain | {"RAY_ADDRESS": "10.0.0.7:6379"})


def check_the_job(machine: Machine, script: str | Path, environment: dict[str, str]) -> None:
    """Check that ``script``, in the job's ``environment``, starts the run that ``KNOBS`` and ``OVERRIDES`` describe."""
    machine.succeed(script, **environment)
    words = machine.words("python3")
    assert "--model=owner/it's: a #model" in words
    job = job_of([word for word in words if not word.startswith("--model=")])
    assert (job.experiment, job.precision, job.recipe, job.steps, job.seed) == ("arithmetic", "bf16", "flowrl", 9, 7)
    assert job.out == Path("/shared/o${NNODES}ut")
    assert job.args == ("trainer.nnodes=3", "trainer.n_gpus_per_node=4", *OVERRIDES)
    assert machine.environment("python3")["RAY_ADDRESS"] == "10.0.0.7:6379"


@pytest.fixture(scope="module")
def sky_words(tmp_path_factory) -> list[str]:
    """The arguments that ``sky.sh`` passes to sky."""
    machine = Machine(tmp_path_factory.mktemp("sky"))
    machine.program("sky")
    machine.succeed("sky.sh", *OVERRIDES, INFRA="k8s", SKY_ARGS="--use-spot", **KNOBS)
    return machine.words("sky")


def test_skypilot_task_has_the_fields_of_skypilot(sky_words):
    task = yaml.safe_load((CONFIGS / "sky.yaml").read_text())
    check(task, TASK)
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [GAVE_UP]
    counted = {"NNODES", "GPUS_PER_NODE"}  # by SkyPilot itself
    assert set(task["envs"]) == {*knobs(), "HF_HOME"} - counted
    assert sky_words[:2] == ["jobs", "launch"] and sky_words[-1] == str(CONFIGS / "sky.yaml")
    options = " ".join(sky_words)
    expected = ("--num-nodes 3", "--gpus H100:4", "--infra k8s", "--use-spot", f"--image-id docker:{IMAGE['IMAGE']}")
    assert [option for option in expected if option not in options] == []
    assert SECRET not in options
    secrets = [sky_words[at + 1] for at, word in enumerate(sky_words) if word == "--secret"]
    assert secrets == ["HF_TOKEN", "WANDB_API_KEY"]


@pytest.mark.parametrize("rank", [0, 1])
def test_skypilot_task_trains_on_its_head(rank, sky_words, machine):
    values = dict(sky_words[at + 1].split("=", 1) for at, word in enumerate(sky_words) if word == "--env")
    task = yaml.safe_load((CONFIGS / "sky.yaml").read_text())
    assert set(values) <= set(task["envs"]) | {"NNODES", "GPUS_PER_NODE"}
    template = machine.home / "sky_templates/ray/start_cluster"
    template.parent.mkdir(parents=True)
    machine.program("start_cluster", "echo started").rename(template)
    machine.program("python3", ALL_BUT_THE_JOB)
    # As SkyPilot does on every node.
    commands = task["run"].replace("/opt/verl-precision/scripts", str(REPO / "scripts"))
    run = machine.program("run.sh", commands)
    node = {"SKYPILOT_NODE_RANK": rank, "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8\n10.0.0.9", "SKYPILOT_NUM_NODES": 3}
    environment = task["envs"] | values | node | {"SKYPILOT_NUM_GPUS_PER_NODE": 4}
    if rank:
        assert machine.succeed(run, **environment).stdout == "started\n" and not machine.called("python3")
    else:
        check_the_job(machine, run, environment)
