"""CPUs for threads outside the team."""

import pytest

from strata_jit.errors import UsageError
from strata_jit.placement import PlanOptions, helper_cpus, plan
from tests.placement.machines import numa

BOX = numa(4, 4, siblings=2)
PLAN = plan(BOX)


def test_off_is_everything():
    assert helper_cpus(BOX, PLAN) == helper_cpus(BOX, PLAN, "off") == BOX.allowed


def test_auto_takes_the_host_core_s_siblings_and_idle_cores():
    assert PLAN.spare == (7, 15)
    assert helper_cpus(BOX, PLAN, "auto") == {8, 7, 15}


def test_auto_takes_all_where_nothing_is_left():
    machine = numa(2)
    assert helper_cpus(machine, plan(machine), "auto") == {0, 1}
    unpinned = plan(machine, None, PlanOptions(workers=9))
    assert helper_cpus(machine, unpinned, "auto") == {0, 1}


def test_a_list():
    assert helper_cpus(BOX, PLAN, "0-2,9") == {0, 1, 2, 9}


@pytest.mark.parametrize("choice", ["", "16", "0-99", "on", "3-"])
def test_lists_without_sense(choice):
    with pytest.raises(UsageError, match="helper CPUs"):
        helper_cpus(BOX, PLAN, choice)
