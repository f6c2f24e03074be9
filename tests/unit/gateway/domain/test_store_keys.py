"""One hash slot for every key, whatever people name their hosts, users and routes."""

from __future__ import annotations

from redis.crc import key_slot

from gateway.admission.capacity import key_of
from gateway.admission.exchange import GATEWAYS_KEY, Exchange
from gateway.admission.first_key import MARKER
from gateway.admission.key_ring import INDEX, record_key
from gateway.admission.limits import Scope, limits_of
from gateway.config.redis_master import SLOT
from gateway.domain.replica import HOSTS_KEY, fleet_key
from gateway.domain.request import Limits


def test_all_keys_lie_in_the_slot_whose_master_is_followed() -> None:
    names = [GATEWAYS_KEY, MARKER, INDEX, record_key("ab"), HOSTS_KEY, fleet_key("host"), fleet_key("h{x}")]
    names += Exchange("p{y}", 1, 0, 1, [], [], []).encode()[0]
    names += [key_of("pool{z}")]
    names += [limit.key for limit in limits_of([Scope("route:org/model{x}", Limits(1, 1, 1, 1, 1))])]
    assert {key_slot(name.encode()) for name in names} == {SLOT}
