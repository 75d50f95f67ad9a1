"""The tree of errors: which of them are a ValueError, and that commands print each as one line."""

import errno
import pickle

import pytest

from hostdev import NonFiniteError, UserError, errors
from hostdev.core import cli
from hostdev.core.errors import raise_if_transient
from hostdev.distributed.agreement import UnlikeError
from hostdev.distributed.session import PeerLostError


def test_only_wrong_input_is_a_value_error():
    found = {name: getattr(errors, name) for name in errors.__all__}
    assert all(issubclass(one, errors.HostdevError) for one in found.values())
    assert {name for name, one in found.items() if issubclass(one, ValueError)} == {
        "UserError",
        "NonFiniteError",
        "TableFullError",
        "DiskFullError",
    }
    assert errors.UserError is UserError
    assert errors.NonFiniteError is NonFiniteError
    assert issubclass(PeerLostError, errors.RankError)
    assert issubclass(UnlikeError, errors.UserError)


@pytest.mark.parametrize("name", errors.__all__)
def test_each_is_one_line_and_exit_code_2(name, capsys):
    def fail(_):
        raise getattr(errors, name)("table 'a':\nthe \x1b[31mcause")

    assert cli.run("hostdev.x", fail, []) == 2
    assert capsys.readouterr().err == "hostdev.x: error: table 'a': the \\x1b[31mcause\n"
    with pytest.raises(getattr(errors, name)) as caught:
        fail([])
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again)) == (type(caught.value), str(caught.value))


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "Too many open files"), MemoryError("4 GiB")])
def test_a_shortage_is_transient(error):
    with pytest.raises(errors.TransientError, match=r"Too many open files.*ulimit -n|memory \(4 GiB\)"):
        raise_if_transient(error)
    raise_if_transient(OSError(errno.EIO, "Input/output error"))
