"""`strata-jit topology` on recorded and described machines: view, JSON, plan of a model, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from strata_jit.cli import main
from strata_jit.engine.setup import node_specs
from strata_jit.engine.sizes import plan_model
from strata_jit.engine.traffic import weight_bytes_per_token
from strata_jit.gguf.reader import open_gguf
from strata_jit.placement import PlanOptions
from strata_jit.pool.host import Pool
from strata_jit.pool.program import AUTO_F32
from strata_jit.topology.machine import read_machine
from tests.topology.conftest import GIB, Files, node_files, regular, unpack_tree, write_tree

DATA = Path(__file__).parent / "data"
TREES = sorted(path.name.removesuffix(".tree") for path in (DATA / "topologies").glob("*.tree"))
MODEL = DATA / "golden" / "llama" / "model.gguf"
VARIABLES = (
    "STRATA_NUMA_POOL",
    "STRATA_POOL_SPIN_US",
    "STRATA_EXCHANGE_ROTATE",
    "STRATA_DECODE_TIMING",
    "STRATA_ROUTE_TAIL_SKIP",
)
STATUS = "Cpus_allowed_list:\t{cpus}\nMems_allowed_list:\t{mems}"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def two_nodes(tmp_path: Path) -> Path:
    """Two sockets of 12 cores with two CPUs each, 8 GiB a node, half of it free."""
    return write_tree(tmp_path / "machine", regular(packages=2, cores=12, threads=2))


def run(*args: object, **env: str) -> Result:
    result = CliRunner().invoke(main, ["topology", *map(str, args)], env=env, prog_name="strata-jit")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def view(*args: object, **env: str) -> str:
    result = run(*args, **env)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


def document(*args: object, **env: str) -> Any:
    text = view(*args, "--json", **env)
    assert text.endswith("\n") and text.count("\n") == 1
    return json.loads(text)


def recorded(name: str, tmp_path: Path) -> Path:
    text = (DATA / "topologies" / f"{name}.tree").read_text("utf-8")
    return unpack_tree(text, tmp_path / name)


def changed(root: Path, files: Files) -> Path:
    return write_tree(root, files)


# --- JSON --------------------------------------------------------------------------------------------------


def test_json_has_the_keys(two_nodes: Path) -> None:
    found = document("--root", two_nodes)
    assert set(found) == {"machine", "limits", "plan", "warnings"}
    assert set(found["plan"]) == {"split", "host_cpu", "workers", "nodes"}
    assert set(found["plan"]["split"]) == {"on", "reason"}
    machine = found["machine"]
    assert {"packages", "nodes", "cores", "cpus_online", "cpus_allowed"} <= set(machine)
    assert machine["packages"][1] == {"id": 1, "cores": 12, "cpus": [*range(12, 24), *range(36, 48)]}
    assert machine["nodes"][0] == {
        "id": 0,
        "cpus": [*range(12), *range(24, 36)],
        "memory_bytes": 8 * GIB,
        "free_bytes": 4 * GIB,
        "distances": [10, 21],
    }
    assert (machine["cores"], machine["cpus_online"]) == (24, list(range(48)))


def test_json_has_the_plan(two_nodes: Path) -> None:
    plan = document("--root", two_nodes)["plan"]
    assert plan["split"] == {"on": True, "reason": "the pool's CPUs span 2 nodes"}
    assert plan["host_cpu"] == 0
    expected = [{"cpu": cpu, "node": 0} for cpu in range(1, 12)]
    assert plan["workers"] == expected + [{"cpu": cpu, "node": 1} for cpu in range(12, 23)]
    empty = {"rows": None, "bytes": None, "room_bytes": 4 * GIB}
    assert plan["nodes"] == [{"node": 0, **empty}, {"node": 1, **empty}]


@pytest.mark.parametrize("name", TREES)
def test_json_and_view_of_recorded_machines(name: str, tmp_path: Path) -> None:
    root = recorded(name, tmp_path)
    found, machine = document("--root", root), read_machine(root)
    assert [package["id"] for package in found["machine"]["packages"]] == [
        package.package_id for package in machine.packages
    ]
    assert [node["id"] for node in found["machine"]["nodes"]] == [node.node_id for node in machine.nodes]
    assert found["machine"]["cores"] == len(machine.all_cores)
    assert found["machine"]["cpus_allowed"] == sorted(machine.allowed)
    text = view("--root", root)
    for cpu in machine.cpus_online:
        assert f"{cpu}x" in text or cpu in machine.allowed
    assert text.isprintable() or all(line.isprintable() for line in text.splitlines())


def test_json_limits_are_lists_with_sources(two_nodes: Path) -> None:
    changed(two_nodes, {"proc/self/status": STATUS.format(cpus="0-3", mems="0")})
    limits = {limit["name"]: limit for limit in document("--root", two_nodes)["limits"]}
    source = "/proc/self/status"
    assert limits["affinity"] == {"name": "affinity", "value": [0, 1, 2, 3], "source": source}
    assert limits["mems_allowed"]["value"] == [0]


# --- the view ----------------------------------------------------------------------------------------------


def test_view_marks_cpus(two_nodes: Path) -> None:
    text = view("--root", two_nodes, "--pool-workers", 12)
    assert "[0H 24.]" in text and "[6W 30.]" in text and "[17W 41.]" in text
    assert "[23s 47s]" in text
    assert "H the host's thread   W worker   s spare core   . allowed, free\n" in text


def test_view_shows_what_is_not_allowed(two_nodes: Path) -> None:
    changed(two_nodes, {"proc/self/status": STATUS.format(cpus="24-27", mems="0-1")})
    text = view("--root", two_nodes)
    assert "[0x 24H]" in text and "[4x 28x]" in text and "x not allowed" in text
    assert "24-27 (4 CPUs)" in text and "/proc/self/status" in text


def test_view_shows_what_is_offline(tmp_path: Path) -> None:
    text = view("--root", recorded("16em64t-4s2c2t-offlines", tmp_path))
    assert "12 CPUs online, 12 allowed, 4 offline" in text
    assert "offline: CPUs 2,5,13-14" in text


def test_view_of_nodes_without_cpus(tmp_path: Path) -> None:
    text = view("--root", recorded("nvidiagpunumanodes", tmp_path))
    (line,) = [line for line in text.splitlines() if line.strip().startswith("250   none")]
    assert line.endswith("no CPUs")


def test_view_tells_kinds_of_cores_apart(tmp_path: Path) -> None:
    text = view("--root", recorded("fakeheterocpunuma", tmp_path))
    assert "12 cores (6 P, 6 E)" in text
    assert "node 0, E cores" in text and "node 3, P cores" in text


def test_view_has_distances_and_memory(two_nodes: Path) -> None:
    text = view("--root", two_nodes)
    assert "8.00 GiB  4.00 GiB" in text
    assert "10  21" in text and "21  10" in text


def test_view_shows_text_of_files_harmlessly(two_nodes: Path) -> None:
    changed(two_nodes, {"proc/cpuinfo": "processor\t: 0\nmodel name\t: Evil \x1b[2J [bold]"})
    assert "Evil \\x1b[2J [bold]" in view("--root", two_nodes)


def test_view_never_wraps_a_remedy(two_nodes: Path) -> None:
    changed(two_nodes, {"proc/sys/kernel/numa_balancing": "1"})
    lines = view("--root", two_nodes).splitlines()
    assert [line for line in lines if line.endswith("echo 0 | sudo tee /proc/sys/kernel/numa_balancing")]


def test_warnings_name_remedies(two_nodes: Path) -> None:
    changed(
        two_nodes,
        {
            "proc/sys/kernel/numa_balancing": "1",
            "sys/devices/system/cpu/cpu3/cpufreq/scaling_governor": "powersave",
            "proc/self/cgroup": "0::/box",
            "sys/fs/cgroup/box/cpu.max": "400000 100000",
        }
        | node_files(1, "12-23,36-47", gib=3, free=2.5),
    )
    text = view("--root", two_nodes)
    assert "echo 0 | sudo tee /proc/sys/kernel/numa_balancing" in text
    assert "echo performance | sudo tee /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor" in text
    assert "echo max | sudo tee /sys/fs/cgroup/box/cpu.max" in text
    assert "node 1 has 3.00 GiB, another 8.00 GiB" in text
    assert "numactl --physcpubind=0-11,24-35" in text
    assert "4 CPUs" in text


def test_warnings_are_none_on_a_good_machine(two_nodes: Path) -> None:
    changed(
        two_nodes,
        {
            "proc/sys/kernel/numa_balancing": "0",
            "sys/devices/system/cpu/cpu3/cpufreq/scaling_governor": "performance",
        },
    )
    assert document("--root", two_nodes)["warnings"] == []
    assert "Warnings" not in view("--root", two_nodes)


def test_warning_of_a_full_node(two_nodes: Path) -> None:
    files = node_files(1, "12-23,36-47", gib=8, free=0.5)
    (key,) = [key for key in files if key.endswith("meminfo")]
    files[key] = f"{files[key]}\nNode 1 Inactive(file):  {5 * 2**20} kB\nNode 1 Active(file):  0 kB"
    changed(two_nodes, files)
    (warning,) = document("--root", two_nodes)["warnings"]
    assert warning.startswith("node 1 has only 512.0 MiB free, 5.00 GiB hold cached files")
    assert warning.endswith("sync; echo 1 | sudo tee /proc/sys/vm/drop_caches")


# --- the plan ----------------------------------------------------------------------------------------------


def test_plan_only_explains_a_choice(two_nodes: Path) -> None:
    text = view("--root", two_nodes, "--plan-only", "--pool-workers", 12)
    assert text.splitlines()[:5] == [
        "Plan",
        "  split on: the pool's CPUs span 2 nodes",
        "  13 threads: the host's on CPU 0, 12 workers",
        "  left free: CPUs 7-11,18-23,31-35,42-47",
        "  by default: 22 workers, split on",
    ]
    assert "Cores" not in text


def test_plan_says_why_there_is_no_split(two_nodes: Path) -> None:
    text = view("--root", two_nodes, "--plan-only", "--pool-workers", 12, STRATA_EXCHANGE_ROTATE="1")
    assert "split off: exchange rotation" in text


def test_plan_of_too_many_workers(two_nodes: Path) -> None:
    text = view("--root", two_nodes, "--plan-only", "--pool-workers", 60)
    assert "61 threads, not pinned: 60 workers and the host's" in text
    assert "threads sleep rather than spin" in text
    assert document("--root", two_nodes, "--pool-workers", 60)["plan"]["host_cpu"] is None


@pytest.mark.parametrize(("value", "on"), [("0", False), ("1", True), ("test", True)])
def test_plan_follows_environment(two_nodes: Path, value: str, on: bool) -> None:
    plan = document("--root", two_nodes, STRATA_NUMA_POOL=value)["plan"]
    assert plan["split"]["on"] is on


def test_plan_option_wins_over_environment(two_nodes: Path) -> None:
    plan = document("--root", two_nodes, "--test-slices", 3, STRATA_NUMA_POOL="0")["plan"]
    assert plan["split"] == {"on": True, "reason": "test mode: 3 slices"}
    assert [node["node"] for node in plan["nodes"]] == [0, 1, 2]


def test_plan_follows_affinity_option(tmp_path: Path) -> None:
    root = recorded("20em64t-hybrid-1p6c2t+2ca4co1t", tmp_path)
    machine = read_machine(root)
    efficient = {cpu for core in machine.all_cores if core.kind == "E" for cpu in core.siblings}
    for affinity in ("all", "auto", "p-cores"):
        plan = document("--root", root, "--pool-affinity", affinity)["plan"]
        taken = {worker["cpu"] for worker in plan["workers"]}
        assert bool(taken & efficient) == (affinity == "all" and bool(efficient))


# --- a model -----------------------------------------------------------------------------------------------


def test_model_adds_rows_bytes_and_ceiling(two_nodes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a plan loads nothing")

    monkeypatch.setattr(Pool, "__init__", refuse)
    found = document("--root", two_nodes, "--model", MODEL, "--bandwidth", 20)
    model, nodes = found["model"], found["plan"]["nodes"]
    assert set(found) == {"machine", "limits", "plan", "warnings", "model"}
    planned = plan_model(open_gguf(MODEL), read_machine(two_nodes), PlanOptions())
    specs = node_specs(planned.plan, planned.model.program)
    for node, spec in zip(nodes, specs, strict=True):
        tensors = planned.model.program.tensors
        cut = [(tensors[i].n_expert, stop - start) for i, (start, stop) in spec.row_ranges.items()]
        assert node["rows"] == sum(n_expert * n_rows for n_expert, n_rows in cut)
        assert 0 < node["bytes"] < node["room_bytes"]
    assert model["fits"] is True
    assert model["ceiling_tok_s"] == pytest.approx(20e9 / max(model["weight_bytes_per_token"]))


def test_model_traffic_is_that_of_a_run() -> None:
    """But that float matrices, which a run may keep as BF16, count as F32."""
    planned = plan_model(open_gguf(MODEL), read_machine(), PlanOptions(workers=0))
    program = planned.model.program
    stored = [replace(t, store_type="F32") if t.store_type == AUTO_F32 else t for t in program.tensors]
    program = replace(program, tensors=tuple(stored))
    assert sum(planned.token_bytes) == weight_bytes_per_token(program, planned.model.n_expert_used)


def test_view_of_a_model(two_nodes: Path) -> None:
    text = view("--root", two_nodes, "--model", MODEL, "--bandwidth", 20, "--ctx", 32)
    assert "context 32" in text and "it fits" in text
    assert "of weights, " in text and "on the busiest node" in text
    assert "at 20.00 GB/s a node, memory allows at most " in text


def test_model_that_does_not_fit(two_nodes: Path) -> None:
    for node, cpus in ((0, "0-11,24-35"), (1, "12-23,36-47")):
        changed(two_nodes, node_files(node, cpus, gib=8, free=0.00001))
    text = view("--root", two_nodes, "--model", MODEL)
    assert "it does not fit" in text
    assert "placement at risk: node 0" in text


# --- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "found"),
    [
        (("--bandwidth", "20"), "--model"),
        (("--ctx", "20"), "--model"),
        (("--root", "/no/such/place"), "/no/such/place"),
        (("--model", "/no/such/model.gguf"), "/no/such/model.gguf"),
        (("--model", str(MODEL), "--bandwidth", "0"), "bandwidth"),
        (("--model", str(MODEL), "--bandwidth", "nan"), "bandwidth"),
        (("--model", str(MODEL), "--ctx", "999999999"), "ctx"),
        (("--pool-affinity", "e-cores"), "--pool-affinity"),
        (("--pool-workers", "-1"), "--pool-workers"),
        (("--test-slices", "0"), "--test-slices"),
    ],
)
def test_refusals_name_what_is_wrong(args: tuple[str, ...], found: str) -> None:
    result = run(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert found in result.stderr


@pytest.mark.parametrize("name", VARIABLES)
def test_environment_is_refused_by_name(name: str) -> None:
    result = run(**{name: "some"})
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {name}=")


def test_root_without_cpus(tmp_path: Path) -> None:
    result = run("--root", tmp_path)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "no CPU" in result.stderr


def test_own_machine_is_shown() -> None:
    machine = read_machine()
    found = document()
    assert found["machine"]["cpus_allowed"] == sorted(machine.allowed)
    assert {limit["name"] for limit in found["limits"]} >= {"affinity"}
