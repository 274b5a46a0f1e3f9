//! Virtual servers for the tests of the dataplane by itself.

use std::net::Ipv4Addr;
use std::sync::Arc;

use ipset_rs::Entry;
use ipvs_netlink::{RealServerKey, Scheduler, SchedulerFlags, VirtualServer, VirtualServerKey};
use ipvs_proxy_core::op::Op;
use ipvs_proxy_core::state::{Key, Role, Set, State, Value};
use ipvs_proxy_netlink::{Family, Protocol};

/// The ops that make it.
pub(crate) fn adds(state: &State) -> Vec<Op> {
    let add = |(key, value): (&Key, &Value)| Op::Add(*key, value.clone());
    state.iter().map(add).collect()
}

/// By which [`server`] is known.
pub(crate) const SET: Set = Set {
    family: Family::V4,
    role: Role::ClusterIp,
};

fn vip(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 96, 0, number)
}

/// A virtual server on its VIP 10.96.0.NUMBER:80, with so many real servers, and what it is known by.
pub(crate) fn server(number: u8, real_servers: u16) -> State {
    let vip = vip(number).into();
    let key = VirtualServerKey::Address {
        address: vip,
        port: 80,
        protocol: Protocol::Tcp,
    };
    let mut state = State::from([
        (Key::Address(vip), Value::Present),
        (
            Key::Entry(SET, Entry::IpPort(vip, Protocol::Tcp, 80)),
            Value::Present,
        ),
        (
            Key::VirtualServer(key),
            Value::VirtualServer(Arc::new(VirtualServer {
                key,
                scheduler: Scheduler::RoundRobin,
                scheduler_flags: SchedulerFlags::default(),
                persistence: None,
                one_packet: false,
                persistence_engine: None,
            })),
        ),
    ]);
    for n in 0..real_servers {
        let [high, low] = n.to_be_bytes();
        let real = RealServerKey {
            address: Ipv4Addr::new(10, number, high, low).into(),
            port: 8080,
        };
        state.insert(Key::RealServer(key, real), Value::RealServer(1));
    }
    state
}
