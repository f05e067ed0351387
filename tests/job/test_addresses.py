"""Which address a rank advertises, decided on made-up machines and once on this one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import ConfigError, addresses, doorway, launchers, starting
from penstock.addresses import LocalAddress, choose
from penstock.config import Options
from penstock.coordinator import Rates
from penstock.rendezvous import Agreement

LO = LocalAddress("lo", "127.0.0.1")
ETH0 = LocalAddress("eth0", "10.0.0.5")
ETH1 = LocalAddress("eth1", "192.168.1.5")
DOCKER = LocalAddress("docker0", "172.17.0.1")
MACHINE = [LO, ETH0, ETH1, DOCKER]


def test_ranks_on_one_machine_use_loopback():
    assert choose(None, True, ["10.0.0.5"], MACHINE).host == "127.0.0.1"


def test_the_route_to_the_meeting_point_decides_between_machines():
    assert choose(None, False, ["192.168.1.5", "10.0.0.5"], MACHINE).interface == "eth1"


def test_a_meeting_point_that_resolves_to_loopback_is_passed_over():
    """Debian lists a host's own name at 127.0.1.1, so rank 0's route to itself is loopback."""
    assert choose(None, False, ["127.0.0.1", "10.0.0.5"], MACHINE).host == "10.0.0.5"
    assert choose(None, False, ["127.0.0.1", None], [LO, ETH0]).host == "10.0.0.5"


@pytest.mark.parametrize(
    ("interface", "host"),
    [
        ("eth1", "192.168.1.5"),
        ("10.0.0.0/8", "10.0.0.5"),
        ("192.168.1.5", "192.168.1.5"),
        ("nothere0,eth1", "192.168.1.5"),
        ("!eth0,!docker0", "192.168.1.5"),
        ("!10.0.0.0/8,!172.16.0.0/12", "192.168.1.5"),
        ("eth0,eth1,!10.0.0.0/8", "192.168.1.5"),
        ("lo,eth0", "10.0.0.5"),
    ],
)
@pytest.mark.parametrize("single_host", [False])
def test_names_blocks_and_exclusions(interface, host, single_host):
    assert choose(interface, single_host, ["10.0.0.5"], MACHINE).host == host


def test_a_given_interface_is_used_on_one_machine_too():
    assert choose("eth1", True, [None], MACHINE).host == "192.168.1.5"
    assert choose("!eth1", True, [None], MACHINE).host == "127.0.0.1"


@pytest.mark.parametrize(
    ("interface", "available", "said"),
    [
        ("lo", MACHINE, "is loopback"),
        ("eth9", MACHINE, "no local address matches"),
        (None, [LO], "no address but loopback"),
        ("!eth0,!eth1,!docker0", MACHINE, "no address but loopback"),
        (None, MACHINE, "not clear which"),
    ],
)
def test_nothing_fits_lists_what_there_is_and_names_the_option(interface, available, said):
    with pytest.raises(ConfigError) as caught:
        choose(interface, False, [None], available)
    text = str(caught.value)
    assert said in text and "PENSTOCK_INTERFACE" in text and "lo 127.0.0.1" in text


@settings(deadline=None)
@given(
    st.one_of(st.none(), st.sampled_from(["lo", "eth0", "!eth0", "127.0.0.0/8", "10.0.0.0/8,lo", "!lo"])),
    st.lists(st.sampled_from([None, "127.0.0.1", "10.0.0.5", "192.168.1.5"]), max_size=3),
    st.lists(st.sampled_from(MACHINE), max_size=4, unique=True),
)
def test_loopback_is_never_advertised_to_another_machine(interface, routed, available):
    try:
        chosen = choose(interface, False, routed, available)
    except ConfigError:
        return
    assert not chosen.host.startswith("127.")
    assert chosen.host in {address.host for address in available}


def test_this_machine():
    hosts = {address.host for address in addresses.local_addresses()}
    assert "127.0.0.1" in hosts
    assert addresses.route_to("127.0.0.1") == "127.0.0.1"
    assert addresses.route_to("no-such-host.invalid") is None
    assert addresses.host_identity() == addresses.host_identity()
    assert addresses.choose_here(None, True, None).host == "127.0.0.1"


@pytest.mark.parametrize(
    ("door", "host"), [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("10.0.0.9", "10.0.0.5")]
)
def test_a_newcomer_is_reached_from_where_it_has_found_a_door(door, host, monkeypatch):
    """A job whose ranks are all on one host may be reached from others by its interface, and it does not say so."""

    class Visit:
        def __init__(self, options, sources, version):
            self.host = door

        def enter(self):
            options = Options(rank=2, world_size=2, elastic=True)
            return Agreement(b"j" * 16, b"s" * 32, True, 1, False, options, hosts=(0, 0)), Rates()

        def close(self):
            pass

    def bind(options, agreement, host):
        bound.append(host)
        raise ConfigError("enough is seen")

    bound = []
    monkeypatch.setattr(doorway, "Entrance", Visit)
    monkeypatch.setattr(addresses, "local_addresses", lambda: MACHINE)
    monkeypatch.setattr(addresses, "route_to", lambda host: ETH0.host)
    monkeypatch.setattr(starting, "_bind", bind)
    with pytest.raises(ConfigError, match="enough is seen"):
        starting.start(launchers.discover({"PENSTOCK_JOIN": f"{door}:41873"}), lambda job: Rates())
    assert bound == [host]
