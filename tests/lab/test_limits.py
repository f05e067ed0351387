"""The limits against a simulation of what attains them, and against numbers worked out by hand and elsewhere."""

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from lab.limits import chosen_wire_s, limits, store_wire_s
from lab.networks import NETWORKS
from lab.trace import LayerTime

MEASURED_SHARE = 0.957
"""What iperf3 measured of a link's nominal rate."""

ticks = st.integers(0, 9)
chains = st.lists(st.tuples(ticks, ticks, ticks), min_size=1, max_size=8)
"""Forward, backward and wire time of each layer, in whole ticks, so that all sums are exact."""


class Wire:
    """One layer's bytes at a time, a tick each; `choose` picks the layer among those that wait."""

    def __init__(self, choose):
        self.choose = choose
        self.waiting = {}  # layer: ticks left, in order of submission
        self.arrived = set()
        self.now = 0

    def submit(self, layer, ticks):
        if ticks:
            self.waiting[layer] = ticks
        else:
            self.arrived.add(layer)

    def tick(self):
        self.now += 1
        if self.waiting:
            layer = self.choose(self.waiting)
            self.waiting[layer] -= 1
            if self.waiting[layer] == 0:
                del self.waiting[layer]
                self.arrived.add(layer)


def simulate(chain, choose, *, barrier=False, serial=False):
    """One step, tick by tick: backward down the layers, forward up again. Returns when forward ends.

    With `barrier` forward begins when all layers have arrived; with `serial` nothing is sent before backward has ended.
    """
    wire, layers = Wire(choose), range(len(chain))
    for layer in reversed(layers):
        for _ in range(chain[layer][1]):
            wire.tick()
        if not serial:
            wire.submit(layer, chain[layer][2])
    if serial:
        for layer in layers:
            wire.submit(layer, chain[layer][2])
    for layer in layers:
        needed = set(layers) if barrier or serial else {layer}
        while not needed <= wire.arrived:
            wire.tick()
        for _ in range(chain[layer][0]):
            wire.tick()
    return wire.now


def first_come(waiting):
    return next(iter(waiting))


def limits_of(chain):
    return limits([LayerTime(forward, backward) for forward, backward, _ in chain], [wire for _, _, wire in chain])


@settings(max_examples=200, deadline=None, print_blob=True)
@given(chains)
def test_lowest_layer_first_attains_the_ideal(chain):
    found = limits_of(chain)
    note(f"{found}")
    assert found.ideal_s == simulate(chain, min)


@settings(max_examples=150, deadline=None, print_blob=True)
@given(chains, st.randoms(use_true_random=False))
def test_no_order_beats_the_ideal(chain, random):
    assert limits_of(chain).ideal_s <= simulate(chain, lambda waiting: random.choice(list(waiting)))


@settings(max_examples=150, deadline=None, print_blob=True)
@given(chains, st.sampled_from([min, max, first_come]))
def test_wait_free_backpropagation_attains_its_limit_in_every_order(chain, choose):
    assert limits_of(chain).wfbp_s == simulate(chain, choose, barrier=True)


@settings(max_examples=100, deadline=None, print_blob=True)
@given(chains)
def test_serial_is_the_sum_and_the_limits_are_in_order(chain):
    found = limits_of(chain)
    assert found.serial_s == simulate(chain, min, serial=True)
    assert found.compute_s <= found.ideal_s <= found.wfbp_s <= found.serial_s
    assert found.compute_s == sum(forward + backward for forward, backward, _ in chain)


def test_the_first_layer_is_never_hidden():
    times = [LayerTime(1.0, 2.0), LayerTime(1.0, 2.0)]
    found = limits(times, [0.5, 100.0])
    assert found.ideal_s == pytest.approx(2.0 + 100.5 + 1.0)  # backward of the last; the wire; forward of the last
    assert limits(times, [0.5, 0.0]).ideal_s == pytest.approx(6.5)
    assert limits(times, [0.0, 0.0]).ideal_s == pytest.approx(6.0)


@pytest.mark.parametrize(("hosts", "mbit", "ideal_s"), [(4, 600, 2.15), (8, 600, 2.49)])
def test_resnet50_at_a_link_has_the_ideal_of_the_design(hosts, mbit, ideal_s):
    trace = NETWORKS["resnet50"]()
    wire_s = store_wire_s(trace, hosts, mbit * 1e6 / 8 * MEASURED_SHARE)
    assert limits(trace.compute(1.2), wire_s).ideal_s == pytest.approx(ideal_s, rel=0.01)


def test_half_of_vgg19_hides_its_wire_time_at_a_gigabit():
    trace = NETWORKS["vgg19"]().widened(0.5)
    found = limits(trace.compute(2.0), store_wire_s(trace, 4, 125e6 * MEASURED_SHARE))
    assert found.compute_s == pytest.approx(2.0)
    assert found.ideal_s == pytest.approx(2.0, rel=0.001)
    assert found.wfbp_s == pytest.approx(2.52, rel=0.01)


def test_a_store_sends_twice_all_but_its_own_share():
    trace = NETWORKS["resnet50"]()
    assert sum(store_wire_s(trace, 4, 1e6)) == pytest.approx(1.5 * trace.nbytes / 1e6)
    assert sum(store_wire_s(trace, 1, 1e6)) == 0
    for layer, wire_s in zip(trace.layers, store_wire_s(trace, 8, 2e6), strict=True):
        assert wire_s == pytest.approx(1.75 * layer.nbytes / 2e6)


@pytest.mark.parametrize(("servers", "share"), [(1, 4.0), (2, 2.0), (4, 1.0), (8, 1.0)])
def test_with_servers_apart_the_busier_of_worker_and_server_counts(servers, share):
    trace = NETWORKS["resnet50"]()
    assert sum(store_wire_s(trace, 4, 1e6, servers)) == pytest.approx(share * trace.nbytes / 1e6)


def test_what_makes_no_sense_is_refused():
    trace = NETWORKS["cifar10-quick"]()
    for hosts, rate in ((0, 1e6), (4, 0.0), (4, float("nan"))):
        with pytest.raises(ValueError, match="positive"):
            store_wire_s(trace, hosts, rate)
    with pytest.raises(ValueError, match="wire time"):
        limits(trace.compute(1.0), [0.0])
    with pytest.raises(ValueError, match="wire time"):
        limits([], [])
    with pytest.raises(ValueError, match="negative"):
        limits([LayerTime(1.0, 1.0)], [-1.0])


def test_layers_that_send_rows_count_what_they_send():
    trace = NETWORKS["vgg19"]()
    store_s = store_wire_s(trace, 4, 125e6)
    rows_bytes = 3 * 32 * (25088 + 4096) * 4
    chosen_s = chosen_wire_s(trace, 4, 125e6, {"fc6": "factors", "conv1_1": "store"}, {"fc6": rows_bytes})
    place = next(place for place, layer in enumerate(trace.layers) if layer.name == "fc6")
    assert chosen_s[place] == pytest.approx(0.0896, rel=1e-3)
    assert chosen_s[:place] == store_s[:place] and chosen_s[place + 1 :] == store_s[place + 1 :]
